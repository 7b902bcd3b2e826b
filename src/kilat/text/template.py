"""Chat templates: a list of messages to the prompt text the model was trained on."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from jinja2 import TemplateError
from jinja2.environment import Template

from kilat.base import gguf_header
from kilat.base.errors import LimitError, ModelFileError, RequestError
from kilat.text.chat import check_messages, check_tools, plain
from kilat.text.fuel import Fuel, variables
from kilat.text.hf_tokenizer import read_config, read_file
from kilat.text.sandbox import Sandbox
from kilat.text.tokenizer import Files, Tokenizer

MAX_TEMPLATE_BYTES: Final = 256 * 1024
MAX_PROMPT_CHARS: Final = 4_000_000
MAX_MESSAGE_CHARS: Final = 2_000

# what a template that is at odds with its input, or is hostile, can raise beside Jinja's own errors
_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)


class ChatTemplate:
    """One template, compiled. Immutable and safe to share between threads.

    ``source`` is Jinja text of at most 256 KiB; ``tools_source``, if there is one, is used instead for requests with tools. ``bos`` and
    ``eos`` are the texts of those tokens. ``now`` tells the time to a template that prints the date. Raises ModelFileError when the
    template is too long or not Jinja.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str,
        eos: str,
        tools_source: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self.tools_source = source if tools_source is None else tools_source
        self._bos = bos
        self._eos = eos
        sandbox = Sandbox(now)
        self._plain = _compile(sandbox, source)
        self._tools = self._plain if tools_source is None else _compile(sandbox, tools_source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Prompt text of at most 4,000,000 characters, to be encoded with ``add_special=False``.

        ``messages`` and ``tools`` are as in OpenAI's API (see text/chat.py), ``extra`` are more variables for the template. Raises
        RequestError for messages that are not in order, or with what the template itself says is wrong with them, LimitError when
        the rendering takes too much work or gives too much text.
        """
        given_tools = check_tools(tools)
        template = self._tools if given_tools else self._plain
        values = {
            "messages": check_messages(messages, keep_developer="developer" in self.source),
            "tools": given_tools,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self._bos,
            "eos_token": self._eos,
        }
        for name, value in (extra or {}).items():
            if name in values or not isinstance(name, str) or not name.isidentifier():
                raise RequestError(
                    f"chat_template_kwargs cannot set {name!r:.50}", param="chat_template_kwargs"
                )
            values[name] = plain(value, f"chat_template_kwargs.{name}")
        values.setdefault("documents", None)
        return _render(template, values)


def load_template(files: Files, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template of a model, or None if it has none; raises ModelFileError when it is damaged."""
    if files.kind == "gguf":
        source, tools_source = _from_gguf(gguf_header.read(files.path).metadata)
    else:
        source, tools_source = _from_directory(files)
    if source is None:
        return None
    bos, eos = ("" if i is None else tokenizer.token_str(i) for i in (tokenizer.bos_id, tokenizer.eos_id))
    return ChatTemplate(source, bos=bos, eos=eos, tools_source=tools_source)


def _from_gguf(metadata: Mapping[str, object]) -> tuple[str | None, str | None]:
    return _text_at(metadata, "tokenizer.chat_template"), _text_at(
        metadata, "tokenizer.chat_template.tool_use"
    )


def _text_at(metadata: Mapping[str, object], key: str) -> str | None:
    found = metadata.get(key)
    if found is not None and not isinstance(found, str):
        raise ModelFileError(f"{key} is not text: the file is damaged")
    return found


def _from_directory(files: Files) -> tuple[str | None, str | None]:
    path = files.path
    if (path / "chat_template.jinja").is_file():
        try:
            named = {"default": read_file(path / "chat_template.jinja").decode("utf-8")}
        except UnicodeDecodeError as e:
            raise ModelFileError(f"chat_template.jinja is not UTF-8 text: {e}") from e
    else:
        found = read_config(path).chat_template
        if found is None or isinstance(found, str):
            return found, None
        named = {entry.get("name", ""): entry.get("template", "") for entry in found}
    return named.get("default"), named.get("tool_use")


def _compile(sandbox: Sandbox, source: str) -> Template:
    size = len(source.encode("utf-8", "surrogatepass"))
    if size > MAX_TEMPLATE_BYTES:
        raise ModelFileError(f"the chat template has {size} bytes, limit {MAX_TEMPLATE_BYTES}")
    try:
        return sandbox.from_string(source)
    except (TemplateError, SyntaxError, *_ERRORS) as e:
        raise ModelFileError(f"the chat template cannot be compiled: {e}") from e


def _render(template: Template, values: Mapping[str, object]) -> str:
    parts, size = [], 0
    try:
        for part in template.generate(variables(values, Fuel())):
            size += len(part)
            if size > MAX_PROMPT_CHARS:
                raise LimitError(f"the prompt has more than {MAX_PROMPT_CHARS} characters", param="messages")
            parts.append(part)
    except TemplateError as e:
        raise RequestError(f"{e.message or e}"[:MAX_MESSAGE_CHARS], param="messages") from e
    except _ERRORS as e:
        raise RequestError(
            f"the chat template cannot be applied to these messages: {type(e).__name__}: {e}"[
                :MAX_MESSAGE_CHARS
            ],
            param="messages",
        ) from e
    return "".join(parts)
