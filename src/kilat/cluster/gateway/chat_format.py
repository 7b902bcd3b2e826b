"""Answers of chat completions: one message, or chunks of it. Both read the same deltas, so they say the same."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from kilat.cluster.gateway.answer import Pieces, sse, usage
from kilat.cluster.gateway.generation import Generation
from kilat.cluster.gateway.logprobs import chat_logprobs, prompt_logprobs
from kilat.cluster.gateway.sample import Piece
from kilat.text.deltas import Content, Delta, Message, Reasoning, ToolStart, assemble
from kilat.text.message import MessageParser
from kilat.text.tokenizer import Tokenizer


class Frame:
    """What all chunks of an answer have in common."""

    def __init__(self, model: str, fingerprint: str, generation: Generation, tokenizer: Tokenizer) -> None:
        self.generation = generation
        self.tokenizer = tokenizer
        self._fields = {
            "id": generation.request_id,
            "object": "",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def body(self, kind: str, choices: Sequence[object], **fields: object) -> dict[str, object]:
        """A whole answer or a chunk of OpenAI's type ``kind``."""
        return {**self._fields, "object": kind, "choices": choices, **fields}


class Choice:
    """What of one sample's text is content, thoughts, or a call of a tool. Without a parser all of it is content."""

    def __init__(self, parser: MessageParser | None) -> None:
        self._parser = parser
        self._called = False
        self.begun = False

    def deltas(self, piece: Piece) -> list[Delta]:
        """News of the message; the same whatever the pieces the text comes in, once they are joined."""
        if self._parser is None:
            return [Content(piece.text)] if piece.text else []
        deltas = self._parser.push(piece.text) if piece.text else []
        if piece.finish is not None:
            deltas = [*deltas, *self._parser.finish()]
        if not self._called:
            self._called = any(isinstance(d, ToolStart) for d in deltas)
        return deltas

    def finish_reason(self, finish: str) -> str:
        """OpenAI's word for how the message ended."""
        return "tool_calls" if self._called and finish == "stop" else finish


class ChatStream:
    """Chunks of a chat answer. Plain content is put together from bytes that were made once."""

    def __init__(self, frame: Frame, choices: Sequence[Choice], *, include_usage: bool) -> None:
        self._frame = frame
        self._choices = choices
        self._usage: dict[str, object] = {"usage": None} if include_usage else {}
        mark = "\0"
        halves = [
            self._chunk(i, {"content": mark}).split(msgspec.json.encode(mark)) for i in range(len(choices))
        ]
        self._halves = [(head, tail) for head, tail in halves]

    def chunks(self, pieces: Pieces) -> bytes:
        out: list[bytes] = []
        for index, piece in pieces:
            choice = self._choices[index]
            if not choice.begun:
                choice.begun = True
                out.append(self._chunk(index, {"role": "assistant", "content": ""}))
            self._add(out, index, choice.deltas(piece), piece)
            if piece.finish is not None:
                reason = choice.finish_reason(piece.finish)
                stop_reason = self._frame.generation.samples[index].stop_reason
                out.append(self._chunk(index, {}, finish_reason=reason, stop_reason=stop_reason))
        return b"".join(out)

    def _add(self, out: list[bytes], index: int, deltas: Sequence[Delta], piece: Piece) -> None:
        logprobs = None
        if piece.logprobs:
            logprobs = {"content": chat_logprobs(self._frame.tokenizer, piece.logprobs), "refusal": None}
            if not deltas:  # text that is held back; its tokens are known already
                deltas = [Content("")]
        head, tail = self._halves[index]
        for delta in deltas:
            if logprobs is None and isinstance(delta, Content):
                out += (head, msgspec.json.encode(delta.text), tail)
            else:
                out.append(self._chunk(index, _delta_body(delta), logprobs=logprobs))
                logprobs = None

    def end(self) -> bytes:
        if not self._usage:
            return b""
        return sse(self._frame.body("chat.completion.chunk", [], usage=usage(self._frame.generation)))

    def _chunk(self, index: int, delta: dict[str, Any], **fields: object) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        return sse(self._frame.body("chat.completion.chunk", [choice], **self._usage))


def _delta_body(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, Reasoning):
        return {"reasoning_content": delta.text}
    if isinstance(delta, ToolStart):
        function = {"name": delta.name, "arguments": ""}
        return {
            "tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]
        }
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}


def _message_body(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.tool_calls
        ]
    if message.reasoning is not None:
        body["reasoning_content"] = message.reasoning
    return body


class ChatWhole:
    """A chat answer in one body."""

    def __init__(self, frame: Frame, choices: Sequence[Choice], *, prompt_logprobs: bool) -> None:
        self._frame = frame
        self._choices = choices
        self._deltas: list[list[Delta]] = [[] for _ in choices]
        self._told: list[list[dict[str, Any]]] = [[] for _ in choices]
        self._finish: list[str | None] = [None] * len(choices)
        self._prompt_logprobs = prompt_logprobs
        self._logprobs = frame.generation.job.params.logprobs is not None

    def add(self, pieces: Pieces) -> None:
        for index, piece in pieces:
            choice = self._choices[index]
            self._deltas[index] += choice.deltas(piece)
            self._told[index] += chat_logprobs(self._frame.tokenizer, piece.logprobs)
            if piece.finish is not None:
                self._finish[index] = choice.finish_reason(piece.finish)

    def body(self) -> object:
        generation = self._frame.generation
        choices = [
            {
                "index": i,
                "message": _message_body(assemble(self._deltas[i])),
                "logprobs": {"content": self._told[i], "refusal": None} if self._logprobs else None,
                "finish_reason": self._finish[i],
                "stop_reason": sample.stop_reason,
            }
            for i, sample in enumerate(generation.samples)
        ]
        extra: dict[str, Any] = {}
        if self._prompt_logprobs:
            extra["prompt_logprobs"] = prompt_logprobs(
                self._frame.tokenizer, generation.prompt_logprobs[0] or []
            )
        return self._frame.body("chat.completion", choices, usage=usage(generation), **extra)
