"""Reads one tool call, a JSON object with a name and arguments, while its text arrives."""

import json
import re
from collections.abc import Callable
from typing import Final

BLANK: Final = " \t\r\n"
"""The white space of JSON."""

ARGUMENT_KEYS: Final = ("arguments", "parameters")
MAX_NAME_CHARS: Final = 256

BLANKS = re.compile(r"[ \t\r\n]*")
_IN_STRING = re.compile(r'[^"\\]*')
_IN_NEST = re.compile(r'[^"{}\[\]<]*')
_IN_WORD = re.compile(r"[-+.\w]*")


class CallScanner:
    """Scans ``{"name": ..., "arguments": {...}}`` (or ``parameters``; in any order; other keys are skipped).

    The call has ``started`` when its name is known and its arguments have begun with ``{``; from then on it is a call whatever
    follows, and :meth:`take` hands out the arguments as the model writes them. ``ended``: the object is over, either closed or
    broken by a character that does not fit, which is not consumed. ``raw``: consumed text that belongs to no arguments, everything
    before the start, and what came after the arguments. Of the arguments only brackets and strings are looked at; a ``<`` outside
    a string ends them, so a call that lacks a brace does not swallow what follows it.
    """

    def __init__(self, *, needs_arguments: bool) -> None:
        self.name: str | None = None
        self.started = False
        self.ended = False
        self._needs_arguments = needs_arguments
        self._arguments: str | None = None
        self._raw: list[str] = []
        self._out: list[str] = []
        self._value: list[str] = []
        self._key = ""
        self._depth = 0
        self._in_quotes = False
        self._escaped = False
        self._streams = False
        self._mode: Callable[[str, int], int] = self._read_open

    @property
    def raw(self) -> str:
        """Consumed text that belongs to no arguments."""
        return "".join(self._raw)

    def take(self) -> str:
        """Text of the arguments since the last call of this."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def feed(self, text: str, at: int) -> int:
        """Consume ``text`` from position ``at``; returns the position behind the last consumed character."""
        while at < len(text) and not self.ended:
            at = self._mode(text, at)
        return at

    # Modes: consume text[at:] as far as it is theirs, say what comes next, return the new position.

    def _read_open(self, text: str, at: int) -> int:
        return self._expect(text, at, {"{": self._read_first_key})

    def _read_first_key(self, text: str, at: int) -> int:
        return self._expect(text, at, {'"': self._read_key, "}": self._close})

    def _read_next_key(self, text: str, at: int) -> int:
        return self._expect(text, at, {'"': self._read_key})

    def _read_colon(self, text: str, at: int) -> int:
        return self._expect(text, at, {":": self._read_value})

    def _read_after(self, text: str, at: int) -> int:
        return self._expect(text, at, {",": self._read_next_key, "}": self._close})

    def _read_key(self, text: str, at: int) -> int:
        end, closed = self._skip_string(text, at)
        self._keep(text[at:end])
        if closed:
            self._key = self._taken_value()[:-1]
            self._mode = self._read_colon
        return end

    def _read_value(self, text: str, at: int) -> int:
        begin = end_of(BLANKS, text, at)
        self._raw.append(text[at:begin])
        if begin == len(text):
            return begin
        char = text[begin]
        if char in "{[":
            is_arguments = self._key in ARGUMENT_KEYS and self._arguments is None and char == "{"
            if is_arguments and self.name is not None and not self.started:
                self._start("")
                self._streams = True
            self._mode = self._read_nest
        elif char == '"':
            self._raw.append(char)
            self._mode = self._read_string
            return begin + 1
        elif end_of(_IN_WORD, text, begin) > begin:
            self._mode = self._read_word
        else:
            self.ended = True
        return begin

    def _read_nest(self, text: str, at: int) -> int:
        begin = at
        while at < len(text):
            if self._in_quotes:
                at, closed = self._skip_string(text, at)
                self._in_quotes = not closed
                continue
            at = end_of(_IN_NEST, text, at)
            if at == len(text):
                break
            if text[at] == "<":
                self.ended = True
                break
            at += 1
            if text[at - 1] == '"':
                self._in_quotes = True
            else:
                self._depth += 1 if text[at - 1] in "{[" else -1
                if self._depth == 0:
                    break
        self._keep(text[begin:at])
        if self._depth == 0:
            self._streams = False
            self._have_value(self._taken_value())
        return at

    def _read_string(self, text: str, at: int) -> int:
        end, closed = self._skip_string(text, at)
        self._keep(text[at:end])
        if closed:
            self._have_value('"' + self._taken_value())
        return end

    def _read_word(self, text: str, at: int) -> int:
        end = end_of(_IN_WORD, text, at)
        self._keep(text[at:end])
        if end < len(text):
            self._have_value(self._taken_value())
        return end

    def _expect(self, text: str, at: int, following: dict[str, Callable[[str, int], int]]) -> int:
        """Blanks, and one of a few characters with the mode that it leads to."""
        end = end_of(BLANKS, text, at)
        if end < len(text):
            mode = following.get(text[end])
            if mode is None:
                self.ended = True
            else:
                self._mode = mode
                end += 1
        self._raw.append(text[at:end])
        if self._mode == self._close:
            self._close(text, end)
        return end

    def _skip_string(self, text: str, at: int) -> tuple[int, bool]:
        """Position behind the closing quote of a string that is open at ``at``, or the end of the text; and whether it closed."""
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            at = end_of(_IN_STRING, text, at)
            if at < len(text):
                at += 1
                if text[at - 1] == '"':
                    return at, True
                self._escaped = True
        return at, False

    def _keep(self, piece: str) -> None:
        if self._streams:
            self._out.append(piece)
        else:
            self._raw.append(piece)
            self._value.append(piece)

    def _taken_value(self) -> str:
        value = "".join(self._value)
        self._value.clear()
        return value

    def _have_value(self, value: str) -> None:
        """The value of ``_key`` is complete (and was streamed, if it is empty)."""
        self._mode = self._read_after
        if self.started:
            return
        if self._key == "name":
            self.name = _text_of(value)
            self.ended = self.name is None or not 0 < len(self.name) <= MAX_NAME_CHARS
        elif self._key in ARGUMENT_KEYS and self._arguments is None:
            self._arguments = _arguments_of(value)
            self.ended = self._arguments is None
        if not self.ended and self.name is not None and self._arguments is not None:
            self._start(self._arguments)

    def _start(self, arguments: str) -> None:
        self.started = True
        self._raw.clear()
        self._out.append(arguments)

    def _close(self, text: str, at: int) -> int:
        """The object is complete: all of it was layout of the call, or it makes no call."""
        if not self.started and self.name is not None and not self._needs_arguments:
            self._start("{}")
        if self.started:
            self._raw.clear()
        self.ended = True
        return at


def end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where a run of what ``pattern`` matches, possibly empty, ends that begins at ``at``."""
    match = pattern.match(text, at)
    return match.end() if match else at


def _text_of(value: str) -> str | None:
    """The string that a JSON string literal stands for; None for another value."""
    try:
        text = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return text if isinstance(text, str) else None


def _arguments_of(value: str) -> str | None:
    """Arguments as JSON text: an object as it is, an object inside a string, ``null`` as none; None for anything else."""
    if value.startswith("{"):
        return value
    if value == "null":
        return "{}"
    text = (_text_of(value) or "").strip(BLANK)
    return text if text.startswith("{") and _is_json(text) else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
