"""A message in pieces (deltas), as a stream carries it, and whole."""

from collections.abc import Iterable, Iterator
from itertools import groupby

import msgspec


class Content(msgspec.Struct, frozen=True, gc=False):
    """More of the answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """More of the thoughts before the answer."""

    text: str


class ToolStart(msgspec.Struct, frozen=True, gc=False):
    """Tool call number ``index`` (from 0) begins; its arguments follow."""

    index: int
    id: str
    name: str


class ToolArguments(msgspec.Struct, frozen=True, gc=False):
    """More of the JSON text of the arguments of call ``index``."""

    index: int
    text: str


Delta = Content | Reasoning | ToolStart | ToolArguments


def join(deltas: Iterable[Delta]) -> Iterator[Delta]:
    """``deltas`` with neighbours of one kind (and one call) made one."""
    for _, group in groupby(deltas, key=lambda d: (type(d), getattr(d, "index", 0))):
        first, *rest = group
        if rest and not isinstance(first, ToolStart):
            text = first.text + "".join(d.text for d in rest if not isinstance(d, ToolStart))
            yield ToolArguments(first.index, text) if isinstance(first, ToolArguments) else type(first)(text)
        else:
            yield first


class ToolCall(msgspec.Struct, frozen=True):
    """A whole tool call. ``arguments`` is the JSON text as the model wrote it; it may be cut short or wrong."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True):
    """A whole message. ``content`` is None when there are only calls, ``reasoning`` is None when there was none."""

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]


def assemble(deltas: Iterable[Delta]) -> Message:
    """The message that ``deltas``, in order, amount to."""
    content, reasoning = [], []
    starts: list[ToolStart] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        match delta:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolStart():
                starts.append(delta)
                arguments.append([])
            case ToolArguments(index, text):
                arguments[index].append(text)
    calls = tuple(ToolCall(s.id, s.name, "".join(a)) for s, a in zip(starts, arguments))
    text = "".join(content)
    return Message(text if text or not calls else None, "".join(reasoning) or None, calls)
