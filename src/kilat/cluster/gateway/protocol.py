"""Bodies of requests, as structs, in the shape of OpenAI's API plus the fields that vLLM's clients use.

A field that we do not know is refused, because it might change the answer; fields that cannot change it are ignored, and fields
we do not support pass when they hold the value that means "off". ``null`` always means "not given".
"""

import re
from typing import Annotated, Any, TypeVar

import msgspec

from kilat.base.errors import LimitError, RequestError

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

MAX_TOOLS = 256
MAX_PROMPTS = 256

# They cannot change the answer: labels, billing, storage, hints for caches and speed.
IGNORED = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
    )
)
# Not supported; these values mean that it is not wanted.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "spaces_between_special_tokens": (True,),
    "continue_final_message": (False,),
}


class StreamOptions(msgspec.Struct, frozen=True):
    """``include_usage``: one more chunk at the end that holds the usage."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(msgspec.Struct, frozen=True):
    name: str | None = None
    schema: Any = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """``type`` is ``text``, ``json_object`` or ``json_schema``."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's way to constrain the output; exactly one field may be set."""

    json: Any = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and text completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Int | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: Int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] | None = None
    cache_salt: Annotated[str, msgspec.Meta(max_length=256)] | None = None


class Function(msgspec.Struct, frozen=True):
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    type: str
    function: Function


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True):
    function: NamedFunction
    type: str = "function"


class ChatRequest(Common, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | NamedTool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None


class CompletionRequest(Common, frozen=True, kw_only=True):
    """POST /v1/completions. ``prompt``: text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Int | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PLACE = re.compile(r" - at `\$\.?(.*)`$")
_NULL = b"null"
_R = TypeVar("_R", bound=msgspec.Struct)


def parse(body: bytes, kind: type[_R]) -> _R:
    """A request body as ``kind``. Raises RequestError with the field at fault."""
    try:
        fields = _FIELDS.decode(body)
        _check_names(fields, kind)
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as e:
        raise _explain(str(e)) from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise RequestError(f"the body is not valid JSON: {e}", code="invalid_json") from e
    except RecursionError as e:
        raise LimitError("the body is nested too deeply") from e


def _check_names(fields: dict[str, msgspec.Raw], kind: type[msgspec.Struct]) -> None:
    known = kind.__struct_fields__
    for name, raw in fields.items():
        if name in known or name in IGNORED or bytes(raw).strip() == _NULL:
            continue
        shown = name[:64]
        if name not in NEUTRAL:
            raise RequestError(
                f"{shown}: this field is not known here; leave it out", param=shown, code="unknown_field"
            )
        if msgspec.json.decode(raw) not in NEUTRAL[name]:
            raise RequestError(f"{shown}: not supported; leave it out", param=shown, code="unsupported_field")


def _explain(text: str) -> RequestError:
    found = _PLACE.search(text)
    where = found.group(1) if found else ""
    what = _PLACE.sub("", text)
    field = where.split("[")[0].split(".")[0]
    if "missing required field" in what:
        name = what.split("`")[1]
        place = f"{where}.{name}" if where else name
        return RequestError(f"{place}: this field is required", param=field or name, code="missing_field")
    return RequestError(f"{where or 'the body'}: {what}", param=field or None, code="invalid_type")
