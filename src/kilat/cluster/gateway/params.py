"""From a request's fields to SamplingParams: defaults, names, and the one grammar that a request may have."""

import re
from typing import Any

import msgspec

from kilat.base.errors import LimitError, RequestError
from kilat.base.ids import new_seed
from kilat.cluster.gateway.protocol import MAX_TOOLS, ChatRequest, Common, CompletionRequest, NamedTool, Tool
from kilat.wire.sampling import (
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
    Grammar,
    SamplingParams,
    check,
)

MAX_CHOICES = 1024
_TOKEN_ID = re.compile(r"[0-9]{1,9}")


def chat_params(request: ChatRequest, *, vocab_size: int) -> SamplingParams:
    """Sampling parameters of a chat request. Raises RequestError that names the field."""
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError(
            "top_logprobs is given but logprobs is not true: set logprobs", param="top_logprobs"
        )
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    if logprobs is not None and not 0 <= logprobs <= MAX_TOP_LOGPROBS:
        raise LimitError(f"top_logprobs is {logprobs}, allowed 0 to {MAX_TOP_LOGPROBS}", param="top_logprobs")
    name = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
    max_tokens = getattr(request, name)
    if max_tokens is not None and max_tokens < 1:
        raise LimitError(f"{name} is {max_tokens}, allowed 1 or more", param=name)
    forced = tool_grammar(request) if offered_tools(request) else None
    grammar = output_grammar(request)
    if forced is not None and grammar is not None:
        raise RequestError(
            "tool_choice forces a call, so the output cannot have another format", param="tool_choice"
        )
    return _build(request, vocab_size, max_tokens=max_tokens, logprobs=logprobs, grammar=forced or grammar)


def completion_params(request: CompletionRequest, *, vocab_size: int) -> SamplingParams:
    """Sampling parameters of a text completion. ``max_tokens`` 0 with ``echo`` scores the prompt: one token is computed and dropped."""
    max_tokens = 16 if request.max_tokens is None else request.max_tokens
    scoring = max_tokens == 0 and bool(request.echo)
    prompt_logprobs = request.prompt_logprobs
    if request.echo and request.logprobs is not None and prompt_logprobs is None:
        prompt_logprobs = request.logprobs
    return _build(
        request,
        vocab_size,
        max_tokens=1 if scoring else max_tokens,
        logprobs=request.logprobs,
        grammar=output_grammar(request),
        prompt_logprobs=prompt_logprobs,
    )


def _build(
    request: Common,
    vocab_size: int,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    grammar: Grammar | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is given but stream is not true", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError("prompt_logprobs cannot be streamed: leave out stream", param="prompt_logprobs")
    params = SamplingParams(
        temperature=_or(request.temperature, 1.0),
        top_k=max(0, _or(request.top_k, 0)),  # -1 is vLLM's "off"
        top_p=_or(request.top_p, 1.0),
        min_p=_or(request.min_p, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request.logit_bias or {}),
        seed=new_seed() if request.seed is None else request.seed,
        n=_or(request.n, 1),
        max_tokens=max_tokens,
        min_tokens=_or(request.min_tokens, 0),
        stop=_stop(request.stop),
        include_stop=bool(request.include_stop_str_in_output),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs if prompt_logprobs is None else prompt_logprobs,
        grammar=grammar,
    )
    check(params, vocab_size=vocab_size)
    return params


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOP_STRINGS:
        raise LimitError(f"{len(stops)} stop strings, at most {MAX_STOP_STRINGS}", param="stop")
    return stops


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    if len(given) > MAX_LOGIT_BIAS:
        raise LimitError(f"{len(given)} logit_bias entries, at most {MAX_LOGIT_BIAS}", param="logit_bias")
    for key in given:
        if _TOKEN_ID.fullmatch(key) is None:
            raise RequestError(f"logit_bias has the key {key[:32]!r}, wanted a token id", param="logit_bias")
    return {int(key): bias for key, bias in given.items()}


def output_grammar(request: Common) -> Grammar | None:
    """The constraint that a request puts on its output, whichever of the known ways it used. At most one may be set."""
    found = [*_from_response_format(request), *_from_structured_outputs(request), *_from_guided(request)]
    if len(found) > 1:
        names = " and ".join(sorted(name for name, _ in found))
        raise RequestError(f"{names} are both given: an output can have one format", param=found[1][0])
    return found[0][1] if found else None


def _from_response_format(request: Common) -> list[tuple[str, Grammar]]:
    form = request.response_format
    if form is None or form.type == "text":
        return []
    if form.type == "json_object":
        return [("response_format", Grammar("json_object"))]
    if form.type != "json_schema":
        raise RequestError(
            f"response_format.type is {form.type[:32]!r}; use text, json_object or json_schema",
            param="response_format",
        )
    if form.json_schema is None or form.json_schema.schema is None:
        raise RequestError("response_format.json_schema.schema is missing", param="response_format")
    return [("response_format", Grammar("json_schema", _schema(form.json_schema.schema, "response_format")))]


def _from_structured_outputs(request: Common) -> list[tuple[str, Grammar]]:
    s = request.structured_outputs
    if s is None:
        return []
    name = "structured_outputs"
    found = [(name, Grammar("json_object"))] if s.json_object else []
    found += _texts(name, s.json, s.regex, s.choice, s.grammar)
    if len(found) != 1:
        raise RequestError(f"structured_outputs sets {len(found)} constraints, wanted one", param=name)
    return found


def _from_guided(request: Common) -> list[tuple[str, Grammar]]:
    return [
        *_texts("guided_json", request.guided_json, None, None, None),
        *_texts("guided_regex", None, request.guided_regex, None, None),
        *_texts("guided_choice", None, None, request.guided_choice, None),
        *_texts("guided_grammar", None, None, None, request.guided_grammar),
    ]


def _texts(
    name: str, schema: Any, regex: str | None, choice: list[str] | None, ebnf: str | None
) -> list[tuple[str, Grammar]]:
    found = []
    if schema is not None:
        found.append((name, Grammar("json_schema", _schema(schema, name))))
    if regex is not None:
        found.append((name, Grammar("regex", regex)))
    if choice is not None:
        if not 1 <= len(choice) <= MAX_CHOICES:
            raise LimitError(f"{name} has {len(choice)} choices, allowed 1 to {MAX_CHOICES}", param=name)
        found.append((name, Grammar("choice", msgspec.json.encode(choice).decode())))
    if ebnf is not None:
        found.append((name, Grammar("ebnf", ebnf)))
    return found


def _schema(schema: Any, name: str) -> str:
    """A JSON schema as text; a string is taken to be that text already."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except msgspec.DecodeError as e:
            raise RequestError(f"{name} is not valid JSON: {e}", param=name) from e
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{name} must be a JSON schema, an object", param=name)
    return msgspec.json.encode(schema).decode()


def _tools(request: ChatRequest) -> list[Tool]:
    try:
        return msgspec.convert(request.tools or [], list[Tool])
    except msgspec.ValidationError as e:
        raise RequestError(f"tools: {e}", param="tools") from e


def offered_tools(request: ChatRequest) -> list[dict[str, Any]]:
    """The tools that the model may call; none when ``tool_choice`` is ``none``. Checks tools and tool_choice."""
    tools = _tools(request)
    choice = request.tool_choice
    if len(tools) > MAX_TOOLS:
        raise LimitError(f"{len(tools)} tools, at most {MAX_TOOLS}", param="tools")
    for tool in tools:
        if tool.type != "function":
            raise RequestError(f"a tool has the type {tool.type[:32]!r}, supported: function", param="tools")
    names = [tool.function.name for tool in tools]
    if len(set(names)) != len(names):
        raise RequestError("two tools have the same name", param="tools")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise RequestError(
            f"tool_choice names {choice.function.name[:64]!r}, which is not in tools", param="tool_choice"
        )
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise RequestError(
            f"tool_choice is {choice[:32]!r}; use none, auto, required or a function", param="tool_choice"
        )
    if choice in ("auto", "required") and not tools:
        raise RequestError(f"tool_choice is {choice} but there are no tools", param="tool_choice")
    return [] if choice == "none" else request.tools or []


def forces_call(request: ChatRequest) -> bool:
    """The answer must be a call of a tool."""
    return isinstance(request.tool_choice, NamedTool) or request.tool_choice == "required"


def tool_grammar(request: ChatRequest) -> Grammar | None:
    """The grammar of ``tool_choice`` required or a named function: one JSON object with ``name`` and ``parameters``."""
    if not forces_call(request):
        return None
    choice = request.tool_choice
    tools = _tools(request)
    if isinstance(choice, NamedTool):
        tools = [t for t in tools if t.function.name == choice.function.name]
    definitions: dict[str, Any] = {}
    calls = [_call_schema(tool, definitions) for tool in tools]
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if definitions:
        schema["$defs"] = definitions
    return Grammar("json_schema", msgspec.json.encode(schema).decode())


def _call_schema(tool: Tool, definitions: dict[str, Any]) -> dict[str, Any]:
    """Schema of a call of ``tool``. Its ``$defs`` move into ``definitions``, for references count from the root of the whole schema."""
    parameters = dict(
        tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
    )
    own = parameters.pop("$defs", {})
    for name, definition in own.items() if isinstance(own, dict) else ():
        if definitions.setdefault(name, definition) != definition:
            raise RequestError(f"two tools define {name[:64]!r} differently: rename one", param="tools")
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
