"""uvicorn's connection, with the limits it lacks: size and time of a request's head, and readers that never read."""

from asyncio import TimerHandle, Transport

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kilat.base.errors import KilatError, LimitError, RequestError
from kilat.cluster.config import MAX_HEADER_BYTES
from kilat.cluster.gateway.errors import error_body, with_status

HEAD_TIMEOUT_S = 30.0
LINGER_S = 2.0
ABORT = "kilat.abort"  # key in the ASGI scope of a function that drops the connection at once


class Connection(HttpToolsProtocol):
    """One client connection. Adds :data:`ABORT` to the scope of its requests."""

    # The parser keeps an unfinished header to itself, so both count: what has come in, and what it has passed on.
    _head_bytes = 0
    _field_bytes = 0
    _head_open = True
    _refused = False
    _head_timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_open and self._head_bytes > MAX_HEADER_BYTES and not self._refused:
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]
        if self._head_timer is None:
            self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._field_bytes += len(name) + len(value)
        if self._field_bytes > MAX_HEADER_BYTES:
            raise _head_too_large()  # the parser stops, and send_400_response is called
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_open = False
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head_open = True
        self._head_bytes = self._field_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that could not be read; whatever else comes on this connection is dropped."""
        error: KilatError
        if self._head_open and max(self._head_bytes, self._field_bytes) > MAX_HEADER_BYTES:
            error = _head_too_large()
            line = b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
        else:
            error = RequestError("this is not a valid HTTP request", code="invalid_http")
            line = b"HTTP/1.1 400 Bad Request\r\n"
        body = msgspec.json.encode(error_body(error))
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        self._refused = True
        self.transport.write(line + head + body)
        # Closing now would reset the connection while the client still sends, and it would never see the answer.
        self.transport.write_eof()
        self._stop_timer()
        self._head_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        """The answer is complete and nothing follows. A reader that has still not taken it loses the rest."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _head_too_large() -> RequestError:
    return with_status(LimitError(f"the headers have more than {MAX_HEADER_BYTES:,} bytes"), 431)
