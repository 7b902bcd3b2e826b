"""`kilat chat`: a conversation in the terminal, streamed. Ctrl-C stops an answer, Ctrl-D leaves."""

import argparse
import asyncio
import importlib
import importlib.util
import re
import sys
import time
from typing import Any

from rich.console import Console

from kilat.base.errors import KilatError
from kilat.cli.client import Chunk, Client
from kilat.cli.rows import CHAT
from kilat.cli.server import Target, target

HELP = (
    "/reset forgets the conversation, /system TEXT sets the system prompt, /exit leaves; "
    "Ctrl-C stops an answer"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def run(args: argparse.Namespace) -> int:
    """Exit status 0; 1 when the input is no terminal and the last answer failed."""
    settings = {"temperature": args.temperature, "max_tokens": args.max_tokens, "seed": args.seed}
    with target(args) as server, asyncio.Runner() as runner:
        client = Client(server.url, api_key=server.api_key)
        screen = Screen()
        chat = Chat(client, server, screen, {k: v for k, v in settings.items() if v is not None})
        chat.set_system(args.system or "")
        screen.note(f"{server.source} at {server.url}. {HELP}" if screen.interactive else "")
        try:
            return _converse(chat, screen, runner)
        finally:
            runner.run(client.__aexit__())


def _converse(chat: "Chat", screen: "Screen", runner: asyncio.Runner) -> int:
    failed = False
    while (line := screen.ask()) is not None:
        word, _, rest = line.strip().partition(" ")
        if word in ("/exit", "/quit"):
            break
        if word == "/reset":
            chat.reset()
            screen.note("forgotten")
        elif word == "/system":
            chat.set_system(rest.strip())
            screen.note("system prompt set" if rest.strip() else "no system prompt")
        elif word.startswith("/"):
            screen.note(HELP)
        elif word:
            failed = not _answer(chat, screen, runner, line)
    return 1 if failed and not screen.interactive else 0


def _answer(chat: "Chat", screen: "Screen", runner: asyncio.Runner, line: str) -> bool:
    """Whether the server answered; an interrupted answer counts."""
    try:
        runner.run(chat.say(line))
    except KeyboardInterrupt:
        chat.keep_partial()
        screen.note("stopped")
    except KilatError as e:
        chat.keep_partial()
        screen.note(f"error: {e.message}")
        return False
    return True


class Chat:
    """The conversation so far. A message of the person stays in it only together with an answer, whole or
    stopped.
    """

    def __init__(self, client: Client, server: Target, screen: "Screen", settings: dict[str, Any]) -> None:
        self._client, self._server, self._screen, self._settings = client, server, screen, settings
        self._system = ""
        self.messages: list[dict[str, str]] = []
        self._said = self._partial = ""

    def set_system(self, text: str) -> None:
        """System prompt of the next answers; empty for none."""
        self._system = text

    def reset(self) -> None:
        """Forget all messages; the system prompt stays."""
        self.messages.clear()

    async def say(self, text: str) -> None:
        """Send ``text`` and show the answer as it comes. Raises KilatError; call :meth:`keep_partial` after
        any exception.
        """
        self._said, self._partial = text, ""
        system = [{"role": "system", "content": self._system}] if self._system else []
        messages = [*system, *self.messages, {"role": "user", "content": text}]
        body = {"model": self._server.model, "messages": messages, **self._settings}
        began = time.perf_counter()
        chunks: list[Chunk] = []
        async for chunk in self._client.stream(CHAT, body):
            if chunk.text or chunk.reasoning or chunk.usage:
                chunks.append(chunk)
            self._screen.thought(chunk.reasoning)
            self._screen.answer(chunk.text)
            self._partial += chunk.text
            if chunk.finish == "length":
                self._screen.note("[cut at the limit of tokens]")
        self.keep_partial()
        self._screen.note(speed(chunks, began))

    def keep_partial(self) -> None:
        """Take what was said and answered so far into the conversation, if anything was answered."""
        if self._partial:
            self.messages.append({"role": "user", "content": self._said})
            self.messages.append({"role": "assistant", "content": self._partial})
        self._said = self._partial = ""


def speed(chunks: list[Chunk], began_s: float) -> str:
    """One line about an answer that was asked for at ``began_s``: tokens, tokens per second after the first,
    time to the first.
    """
    times = [c.at_s for c in chunks if c.text or c.reasoning]
    if not times:
        return "empty answer"
    counts = [c.usage.completion_tokens for c in chunks if c.usage]
    n = counts[-1] if counts else len(times)
    rate = f"{(n - 1) / (times[-1] - times[0]):.1f} tokens/s, " if n > 1 and times[-1] > times[0] else ""
    return f"{n} tokens, {rate}first after {(times[0] - began_s) * 1e3:.0f} ms"


class Screen:
    """Reads lines and shows text: dim notes on a terminal; elsewhere answers go to standard output, notes to
    standard error.
    """

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._notes = self._console if self._console.is_terminal else Console(stderr=True, highlight=False)
        self.interactive = sys.stdin.isatty()
        self._column = 0
        if self.interactive and importlib.util.find_spec("readline"):
            importlib.import_module("readline")  # gives input() line editing and a history

    def ask(self) -> str | None:
        """The next line, or None at the end of the input."""
        while True:
            try:
                return input("> " if self.interactive and self._console.is_terminal else "")
            except EOFError:
                return None
            except KeyboardInterrupt:
                self.note("Ctrl-D leaves")

    def answer(self, text: str) -> None:
        """A piece of the answer."""
        self._write(text, "")

    def thought(self, text: str) -> None:
        """A piece of the model's reasoning."""
        self._write(text, "dim")

    def note(self, text: str) -> None:
        """One line beside the conversation. Nothing for empty text."""
        if self._column:
            self._write("\n", "")
        if text:
            self._notes.print(text, style="dim", markup=False, soft_wrap=True)

    def _write(self, text: str, style: str) -> None:
        if self._console.is_terminal:  # a model's text must not be able to steer the terminal
            text = _CONTROL.sub("", text)
        if text:
            self._console.print(text, style=style, markup=False, soft_wrap=True, end="")
            self._console.file.flush()
            self._column = len(text) - text.rfind("\n") - 1 if "\n" in text else self._column + len(text)
