"""From a request's messages or prompt to token ids. Large texts are handled in a thread, so that they hold up no stream."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import msgspec

from kilat.base.errors import LimitError, RequestError
from kilat.cluster.gateway.protocol import MAX_MESSAGES, MAX_PROMPTS, Message, Tool
from kilat.text.message import OPEN_THINK, detect_style, opens_thinking
from kilat.text.template import ChatTemplate
from kilat.text.tokenizer import Tokenizer

INLINE_CHARS = 4096
MAX_TEMPLATE_ARGUMENTS = 32
MAX_TEMPLATE_TEXT = 1024
ROLES = ("system", "developer", "user", "assistant", "tool")
# What the renderer itself passes to a template.
RESERVED = frozenset(("messages", "tools", "add_generation_prompt", "bos_token", "eos_token"))

_T = TypeVar("_T")


class ChatPrompt(NamedTuple):
    """A rendered conversation. ``thinking``: it ends inside the model's thoughts."""

    ids: list[int]
    thinking: bool


class PromptBuilder:
    """Owns the thread pool for long prompts. ``template`` is None for a model that has none.

    ``style`` is how the model writes tool calls, ``thinks`` whether its answers may begin with thoughts.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self.template = template
        source = template.source if template is not None else ""
        self.style = detect_style(source)
        self.thinks = OPEN_THINK in source
        self._pool = ThreadPoolExecutor(2, "prompt")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, size_chars: int, work: Callable[[], _T]) -> _T:
        """``work()``, here when its input is short, else in the pool."""
        if size_chars <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        *,
        add_generation_prompt: bool,
        add_special: bool,
        arguments: dict[str, Any],
    ) -> ChatPrompt:
        """A conversation as the model reads it. Raises RequestError for messages that no template takes, or this one does not."""
        template = self.template
        if template is None:
            raise RequestError("this model has no chat template: use /v1/completions", param="messages")
        _check_arguments(arguments)
        plain = plain_messages(messages)
        offered = [plain_tool(t) for t in tools]

        def work() -> ChatPrompt:
            text = template.render(
                plain, tools=offered or None, add_generation_prompt=add_generation_prompt, extra=arguments
            )
            return ChatPrompt(self.tokenizer.encode(text, add_special=add_special), opens_thinking(text))

        size = sum(len(m["content"] or "") for m in plain) + 256 * len(plain) + 1024 * len(offered)
        return await self.run(size, work)

    async def texts(self, texts: Sequence[str], *, add_special: bool) -> list[list[int]]:
        """Token ids of each text."""
        encode = self.tokenizer.encode
        return await self.run(
            sum(len(t) for t in texts), lambda: [encode(t, add_special=add_special) for t in texts]
        )


def split_prompts(prompt: str | list[str | int | list[int]]) -> tuple[list[str], list[list[int]]]:
    """A completion's ``prompt`` as texts or as token ids; the other list is empty. Raises RequestError for a mixture."""
    if isinstance(prompt, str):
        return [prompt], []
    if not prompt:
        raise RequestError("the prompt is an empty list", param="prompt")
    if all(isinstance(p, int) for p in prompt):
        return [], [prompt]  # type: ignore[list-item]
    if len(prompt) > MAX_PROMPTS:
        raise LimitError(f"{len(prompt)} prompts in one request, at most {MAX_PROMPTS}", param="prompt")
    if all(isinstance(p, str) for p in prompt):
        return list(prompt), []  # type: ignore[arg-type]
    if all(isinstance(p, list) for p in prompt):
        return [], list(prompt)  # type: ignore[arg-type]
    raise RequestError("the prompt mixes texts and token ids", param="prompt")


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text parts joined, arguments of calls as objects. Raises RequestError."""
    if not messages:
        raise RequestError("messages is empty: send at least one", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise LimitError(f"{len(messages)} messages, at most {MAX_MESSAGES}", param="messages")
    return [_plain_message(m) for m in messages]


def _plain_message(m: Message) -> dict[str, Any]:
    if m.role not in ROLES:
        raise RequestError(
            f"a message has the role {m.role[:32]!r}; use {', '.join(ROLES)}", param="messages"
        )
    if m.content is None and not m.tool_calls:
        raise RequestError(f"a {m.role} message has no content", param="messages")
    out: dict[str, Any] = {"role": "system" if m.role == "developer" else m.role, "content": _text_of(m)}
    for name in ("name", "reasoning_content", "tool_call_id"):
        value = getattr(m, name)
        if value is not None:
            out[name] = value
    if m.tool_calls:
        out["tool_calls"] = [
            {
                "id": c.id,
                "type": "function",
                "function": {"name": c.function.name, "arguments": _arguments(c.function.arguments)},
            }
            for c in m.tool_calls
        ]
    return out


def _text_of(m: Message) -> str:
    if m.content is None or isinstance(m.content, str):
        return m.content or ""
    for part in m.content:
        if part.type != "text" or part.text is None:
            raise RequestError(
                f"a message part has the type {part.type[:32]!r}, supported: text", param="messages"
            )
    return "".join(part.text or "" for part in m.content)


def _arguments(text: str) -> Any:
    try:
        value = msgspec.json.decode(text) if text.strip() else {}
    except msgspec.DecodeError as e:
        raise RequestError(f"the arguments of a tool call are not valid JSON: {e}", param="messages") from e
    if not isinstance(value, dict):
        raise RequestError("the arguments of a tool call are not a JSON object", param="messages")
    return value


def plain_tool(tool: Tool) -> dict[str, Any]:
    """A tool as templates expect it, with the fields that the client sent."""
    f = tool.function
    function: dict[str, Any] = {"name": f.name}
    if f.description is not None:
        function["description"] = f.description
    function["parameters"] = f.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _check_arguments(arguments: dict[str, Any]) -> None:
    if len(arguments) > MAX_TEMPLATE_ARGUMENTS:
        raise LimitError(
            f"{len(arguments)} chat_template_kwargs, at most {MAX_TEMPLATE_ARGUMENTS}",
            param="chat_template_kwargs",
        )
    for name, value in arguments.items():
        if not name.isidentifier() or name.startswith("_") or name in RESERVED or len(name) > 64:
            raise RequestError(
                f"chat_template_kwargs has the name {name[:64]!r}", param="chat_template_kwargs"
            )
        if isinstance(value, str) and len(value) > MAX_TEMPLATE_TEXT:
            raise LimitError(
                f"chat_template_kwargs.{name} has {len(value)} characters, at most {MAX_TEMPLATE_TEXT}",
                param="chat_template_kwargs",
            )
