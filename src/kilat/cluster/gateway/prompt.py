"""From a request's messages or prompt to token ids. Large texts are handled in a thread, so that they hold up no stream."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from kilat.base.errors import LimitError, RequestError
from kilat.cluster.gateway.protocol import MAX_PROMPTS
from kilat.text.message import OPEN_THINK, detect_style, opens_thinking
from kilat.text.template import ChatTemplate
from kilat.text.tokenizer import Tokenizer

INLINE_BYTES = 4096
MAX_TEMPLATE_ARGUMENTS = 32
MAX_TEMPLATE_TEXT = 1024
_T = TypeVar("_T")


class Dialogue(NamedTuple):
    """What is rendered: messages and tools as in OpenAI's API, ``arguments`` for the template besides."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    add_generation_prompt: bool
    add_special: bool
    arguments: dict[str, Any]


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

    async def run(self, size_bytes: int, work: Callable[[], _T]) -> _T:
        """``work()``, here when its input is short, else in the pool."""
        if size_bytes <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def chat(self, talk: Dialogue, *, size_bytes: int) -> ChatPrompt:
        """A conversation as the model reads it; ``size_bytes`` of the request decides where the work is done.

        Raises RequestError for messages that no template takes, or this one does not.
        """
        template = self.template
        if template is None:
            raise RequestError("this model has no chat template: use /v1/completions", param="messages")
        _check_arguments(talk.arguments)

        def work() -> ChatPrompt:
            text = template.render(
                talk.messages,
                tools=talk.tools or None,
                add_generation_prompt=talk.add_generation_prompt,
                extra=talk.arguments,
            )
            return ChatPrompt(self.tokenizer.encode(text, add_special=talk.add_special), opens_thinking(text))

        return await self.run(size_bytes, work)

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


def _check_arguments(arguments: dict[str, Any]) -> None:
    if len(arguments) > MAX_TEMPLATE_ARGUMENTS:
        raise LimitError(
            f"{len(arguments)} chat_template_kwargs, at most {MAX_TEMPLATE_ARGUMENTS}",
            param="chat_template_kwargs",
        )
    for name, value in arguments.items():
        if len(name) > MAX_TEMPLATE_TEXT or (isinstance(value, str) and len(value) > MAX_TEMPLATE_TEXT):
            raise LimitError(
                f"chat_template_kwargs.{name[:64]} has more than {MAX_TEMPLATE_TEXT} characters",
                param="chat_template_kwargs",
            )
