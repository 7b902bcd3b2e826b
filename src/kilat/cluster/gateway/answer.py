"""How an answer travels: as one JSON body, or as server-sent events while it is written. Both are ASGI applications."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from kilat.base.errors import KilatError
from kilat.cluster.gateway.errors import as_kilat_error, error_body, json_response
from kilat.cluster.gateway.generation import Generation
from kilat.cluster.gateway.sample import Piece
from kilat.cluster.gateway.serving import Gateway

KEEP_ALIVE = b": still working\n\n"
DONE = b"data: [DONE]\n\n"

Pieces = Sequence[tuple[int, Piece]]


class StreamWriter(Protocol):
    """The format of a stream. ``chunks`` are the events for some news; ``end`` comes once, after the last."""

    def chunks(self, pieces: Pieces) -> bytes: ...

    def end(self) -> bytes: ...


class WholeWriter(Protocol):
    """The format of an answer in one body."""

    def add(self, pieces: Pieces) -> None: ...

    def body(self) -> object: ...


def usage(generation: Generation, *, output_tokens: int | None = None) -> dict[str, Any]:
    """OpenAI's ``usage`` of a generation."""
    n_out = generation.output_tokens if output_tokens is None else output_tokens
    return {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": n_out,
        "total_tokens": generation.prompt_tokens + n_out,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


def sse(body: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class WholeAnswer:
    """Runs a generation to its end and sends the answer. Errors are raised, to be answered with their own status."""

    def __init__(self, gateway: Gateway, generation: Generation, writer: WholeWriter) -> None:
        self._gateway = gateway
        self._generation = generation
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        async with self._gateway.running(generation, scope, receive):
            while not generation.done:
                self._writer.add(await generation.next())
        response = json_response(self._writer.body(), headers={"x-request-id": generation.request_id})
        await response(scope, receive, send)


class EventStream:
    """Runs a generation and sends each step's news in one write.

    The headers wait for the first news (or a while), so a request that is refused is answered with its own status. An error after
    that is the last event of the stream, without ``[DONE]``.
    """

    def __init__(self, gateway: Gateway, generation: Generation, writer: StreamWriter) -> None:
        self._gateway = gateway
        self._generation = generation
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._gateway.running(self._generation, scope, receive):
            pieces = await self._generation.next()
            await send({"type": "http.response.start", "status": 200, "headers": self._headers()})
            try:
                last = await self._stream(pieces, send)
            except Exception as e:  # noqa: BLE001  (the headers are out: whatever it is, the stream must say so)
                last = _last_words(as_kilat_error(e))
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _stream(self, pieces: Pieces, send: Send) -> bytes:
        generation, writer = self._generation, self._writer
        while True:
            body = writer.chunks(pieces) if pieces else KEEP_ALIVE
            if generation.done:
                return body + writer.end() + DONE
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            pieces = await generation.next()

    def _headers(self) -> list[tuple[bytes, bytes]]:
        return [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", self._generation.request_id.encode()),
        ]


def _last_words(error: KilatError) -> bytes:
    return sse(error_body(error))
