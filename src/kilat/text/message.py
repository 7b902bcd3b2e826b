"""A model's text as a message: reasoning, content and tool calls, while it arrives.

Formats: reasoning between ``<think>`` and ``</think>`` at the start; ``hermes`` (Hermes 2, Qwen2.5, Qwen3): any number of
``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` with text around them; ``llama`` (Llama 3): the whole message is
``{"name": ..., "parameters": {...}}``, several separated by ``;``, after an optional ``<|python_tag|>``.

Text that does not keep to the format is content, word for word. White space between markup and text is layout and is dropped.
"""

from collections.abc import Callable
from hashlib import blake2b
from secrets import token_hex
from typing import Final

from kilat.text.calls import BLANK, BLANKS, CallScanner, end_of
from kilat.text.deltas import Content, Delta, Reasoning, ToolArguments, ToolStart, join

OPEN_THINK: Final = "<think>"
CLOSE_THINK: Final = "</think>"
OPEN_CALL: Final = "<tool_call>"
CLOSE_CALL: Final = "</tool_call>"
PYTHON_TAG: Final = "<|python_tag|>"


def detect_style(template: str) -> str | None:
    """Format of the tool calls that a chat template asks for: ``hermes``, ``llama``, or None for none that is known."""
    if OPEN_CALL in template:
        # the same tag around something other than JSON (GLM-4.5, Qwen3-Coder)
        return None if "<arg_key>" in template or "<function=" in template else "hermes"
    if PYTHON_TAG in template or ('"parameters": ' in template and "<|start_header_id|>" in template):
        return "llama"
    return None


def opens_thinking(prompt: str) -> bool:
    """Whether a rendered prompt ends inside ``<think>``, so that the model's text begins with thoughts."""
    return prompt.rstrip(BLANK).endswith(OPEN_THINK)


class _Prose:
    """Running text, of which white space next to markup is layout. ``holds``: markup may follow any white space."""

    def __init__(self, *, holds: bool, after_markup: bool) -> None:
        self.holds = holds
        self._after_markup = after_markup
        self._said = False
        self._blanks: list[str] = []

    def mark(self) -> None:
        """Markup stands here."""
        self._after_markup = True

    def say(self, text: str) -> str:
        """What can be sent of ``text`` and of the white space before it."""
        if not self.holds and not self._after_markup:
            return text
        body = text.strip(BLANK)
        if not body:
            self._blanks.append(text)
            return ""
        head = text[: len(text) - len(text.lstrip(BLANK))]
        tail = text[len(head) + len(body) :]
        if self._said or not self._after_markup:
            body = "".join(self._blanks) + head + body
        self._blanks = [tail] if self.holds else []
        self._said = True
        self._after_markup = False
        return body if self.holds else body + tail

    def end(self) -> str:
        """The white space at the end, if no markup stands before it."""
        return "" if self._after_markup else "".join(self._blanks)


class MessageParser:
    """Turns pushes of text into deltas; put together they give the same message however the text was split.

    ``style`` is what :func:`detect_style` found; calls are looked for only with ``tools``. ``thinking``: the prompt left ``<think>``
    open. ``seed`` makes the ids of the calls a function of it and of their index, so that a replay gives the same; None draws one.
    """

    def __init__(
        self, style: str | None, *, tools: bool, thinking: bool = False, seed: str | None = None
    ) -> None:
        self._style = style if tools else None
        self._seed = token_hex(8) if seed is None else seed
        self._content = _Prose(holds=self._style == "hermes", after_markup=False)
        self._thoughts = _Prose(holds=True, after_markup=True)
        self._text = ""
        self._at = 0
        self._deltas: list[Delta] = []
        # consumed markup and white space that is content after all if it leads to no call
        self._head: list[str] = []
        self._scanner: CallScanner | None = None
        self._n_calls = 0
        self._mode: Callable[[], bool] = self._read_thinking_start if thinking else self._read_start

    def push(self, text: str) -> list[Delta]:
        """Deltas of the next piece of the model's text."""
        self._text = self._text[self._at :] + text
        self._at = 0
        while self._at < len(self._text) and self._mode():
            pass
        return self._taken()

    def finish(self) -> list[Delta]:
        """Deltas of what was held back at the end of the model's text; markup that was not completed is content."""
        rest = "".join(self._head) + (self._scanner.raw if self._scanner else "") + self._text[self._at :]
        if self._mode in (self._read_thoughts, self._read_thinking_start):
            self._emit(Reasoning(self._thoughts.say(rest) + self._thoughts.end()))
        else:
            self._emit(Content(self._content.say(rest) + self._content.end()))
        return self._taken()

    # Modes: each consumes what is certain, may switch to another, and returns False when it has to see more text first.

    def _read_start(self) -> bool:
        self._read_blanks()
        found = self._read_tag(OPEN_THINK)
        if found:
            self._head.clear()
            self._mode = self._read_thoughts
        elif found is False:
            self._begin_answer()
        return found is not None

    def _read_thinking_start(self) -> bool:
        self._read_blanks()
        found = self._read_tag(OPEN_THINK)
        if found is not None:
            self._head.clear()
            self._mode = self._read_thoughts
        return found is not None

    def _read_thoughts(self) -> bool:
        text, found = self._read_until(CLOSE_THINK)
        self._emit(Reasoning(self._thoughts.say(text)))
        if found:
            self._content.mark()
            self._begin_answer()
        return found

    def _begin_answer(self) -> None:
        if self._style == "llama":
            self._mode = self._read_python_tag
        else:
            self._give_back()

    def _read_prose(self) -> bool:
        if self._style != "hermes":
            self._say(self._text[self._at :])
            self._at = len(self._text)
            return False
        text, found = self._read_until(OPEN_CALL)
        self._say(text)
        if found:
            self._head.append(OPEN_CALL)
            self._scanner = CallScanner(needs_arguments=False)
            self._mode = self._read_call
        return found

    def _read_call(self) -> bool:
        scanner = self._scanner
        assert scanner is not None
        began = scanner.started
        self._at = scanner.feed(self._text, self._at)
        if scanner.started:
            if not began:
                self._emit(ToolStart(self._n_calls, self._call_id(), scanner.name or ""))
                self._n_calls += 1
                self._head.clear()
                self._content.mark()
            self._emit(ToolArguments(self._n_calls - 1, scanner.take()))
        if not scanner.ended:
            return False
        self._head.append(scanner.raw)
        self._scanner = None
        if not scanner.started:
            self._give_back()
        elif scanner.raw.strip(BLANK):
            self._say("".join(self._head))
            self._head.clear()
        self._mode = self._read_call_end if scanner.started else self._read_prose
        return True

    def _read_call_end(self) -> bool:
        self._read_blanks()
        if self._style == "llama":
            if self._text.startswith(";", self._at):
                self._at += 1
                self._head.append(";")
                self._mode = self._read_python_tag
            elif self._at < len(self._text):
                self._give_back()
            return True
        found = self._read_tag(CLOSE_CALL)
        if found:
            self._head.clear()
            self._mode = self._read_prose
        elif found is False:
            self._give_back()
        return found is not None

    def _read_python_tag(self) -> bool:
        self._read_blanks()
        found = self._read_tag(PYTHON_TAG)
        if found:
            self._head.append(PYTHON_TAG)
        if found is not None:
            self._mode = self._read_brace
        return found is not None

    def _read_brace(self) -> bool:
        self._read_blanks()
        if self._text.startswith("{", self._at):
            self._scanner = CallScanner(needs_arguments=True)
            self._mode = self._read_call
        elif self._at < len(self._text):
            self._give_back()
        return True

    def _give_back(self) -> None:
        """What was taken for markup is content, and so is what follows."""
        self._say("".join(self._head))
        self._head.clear()
        self._mode = self._read_prose

    def _read_blanks(self) -> None:
        end = end_of(BLANKS, self._text, self._at)
        self._head.append(self._text[self._at : end])
        self._at = end

    def _read_tag(self, tag: str) -> bool | None:
        """Consume ``tag`` if it comes next; None if the text ends before that can be told."""
        ahead = self._text[self._at : self._at + len(tag)]
        if ahead == tag:
            self._at += len(tag)
            return True
        return None if tag.startswith(ahead) else False

    def _read_until(self, tag: str) -> tuple[str, bool]:
        """Text before ``tag``, and whether the tag was found and consumed; if not, a possible start of it is left."""
        begin, text = self._at, self._text
        found = text.find(tag, begin)
        if found >= 0:
            self._at = found + len(tag)
            return text[begin:found], True
        keep = min(len(tag) - 1, len(text) - begin) if "<" in text[-len(tag) :] else 0
        while keep and not text.endswith(tag[:keep]):
            keep -= 1
        self._at = len(text) - keep
        return text[begin : self._at], False

    def _say(self, text: str) -> None:
        self._emit(Content(self._content.say(text)))

    def _call_id(self) -> str:
        return "call_" + blake2b(f"{self._seed}:{self._n_calls}".encode(), digest_size=12).hexdigest()

    def _emit(self, delta: Delta) -> None:
        if isinstance(delta, ToolStart) or delta.text:
            self._deltas.append(delta)

    def _taken(self) -> list[Delta]:
        """The deltas of this push, neighbours of one kind joined."""
        deltas, self._deltas = self._deltas, []
        return deltas if len(deltas) < 2 else list(join(deltas))
