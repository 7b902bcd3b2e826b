"""An OpenAI-shaped server on loopback that answers by a rule, fails by a script, and remembers what it was
asked.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "fake"


@dataclass
class Fail:
    """Answer with this status and message instead; ``bare``: without an error object, as a server of another API."""

    status: int
    message: str = "no"
    code: str = "fake_error"
    headers: dict[str, str] = field(default_factory=dict)
    bare: bool = False


class Drop:
    """Close the connection without an answer; inside a stream: after the first word."""


@dataclass
class Hold:
    """Send the first word, then wait for the event before the rest."""

    event: threading.Event


@dataclass
class Breaks:
    """Send the first word, then an error inside the stream."""

    message: str


Action = Fail | Drop | Hold | Breaks | None
Script = Callable[[dict[str, Any], int], Action]


@dataclass
class FakeServer:
    """``script(body, nth)`` decides about the nth POST (from 0). ``bodies`` are all POSTs. ``deaf``: GETs get
    no answer.
    """

    script: Script = lambda body, nth: None
    model: str = MODEL
    key: str | None = None
    deaf: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, body: dict[str, Any]) -> int:
        with self.lock:
            self.bodies.append(body)
            return len(self.bodies) - 1


def words_of(body: dict[str, Any]) -> list[str]:
    """The answer, as a list of pieces: an echo of what was asked."""
    asked = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    return ["You ", "said ", f"{asked}."]


@contextmanager
def running(fake: FakeServer) -> Iterator[FakeServer]:
    """Run ``fake`` on a free port for the time of the block."""
    handler = type("Handler", (_Handler,), {"fake": fake})
    server = _Server(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(
            sys.exc_info()[1], OSError
        ):  # killed clients hang up; that is not worth a traceback
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"
    wbufsize = 65536
    disable_nagle_algorithm = True

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.fake.deaf:
            self.close_connection = True
        elif self.path == "/health/ready":
            self._json(200, {"status": "ready"})
        elif self.fake.key and self.headers.get("authorization") != f"Bearer {self.fake.key}":
            self._fail(Fail(401, "wrong key", "invalid_api_key"))
        else:
            self._json(200, {"object": "list", "data": [{"id": self.fake.model, "object": "model"}]})

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        data = self.rfile.read(length)
        if len(data) < length:  # the client was killed while it sent
            return
        body = json.loads(data)
        action = self.fake.script(body, self.fake.count(body))
        if isinstance(action, Fail):
            self._fail(action)
        elif isinstance(action, Drop) and not body.get("stream"):
            self.close_connection = True
        elif body.get("stream"):
            self._stream(body, action)
        else:
            if isinstance(action, Hold):
                action.event.wait(30)
            self._json(200, {**_choice(body, "".join(words_of(body)), "stop"), "usage": _usage(body)})

    def _stream(self, body: dict[str, Any], action: Action) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            for i, word in enumerate(words_of(body)):
                self._event(_choice(body, word, None))
                if i == 0 and isinstance(action, Drop):
                    return
                if i == 0 and isinstance(action, Breaks):
                    self._event({"error": {"message": action.message, "code": "engine_failed"}})
                    return
                if i == 0 and isinstance(action, Hold):
                    self._wait(action.event)
            self._event(_choice(body, "", "stop"))
            if body.get("stream_options", {}).get("include_usage"):
                self._event({"choices": [], "usage": _usage(body)})
            self._write(b"data: [DONE]\n\n")
        except OSError:
            self.fake.hung_up.set()

    def _wait(self, event: threading.Event) -> None:
        deadline = time.monotonic() + 30
        while not event.wait(0.02) and time.monotonic() < deadline:
            self._write(b": still here\n\n")  # finds out whether the client hung up

    def _event(self, fields: dict[str, Any]) -> None:
        self._write(b"data: " + json.dumps(fields).encode() + b"\n\n")

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def _fail(self, fail: Fail) -> None:
        fields = {"error": {"message": fail.message, "type": "x", "param": None, "code": fail.code}}
        self._json(fail.status, {} if fail.bare else fields, fail.headers)

    def _json(self, status: int, fields: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        data = json.dumps(fields).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.send_header("x-request-id", "req-1")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def _choice(body: dict[str, Any], text: str, finish: str | None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    if "prompt" in body:
        choice["text"] = text
    elif body.get("stream"):
        choice["delta"] = {"content": text}
    else:
        choice["message"] = {"role": "assistant", "content": text}
    return {"id": "cmpl-1", "model": body.get("model"), "choices": [choice]}


def _usage(body: dict[str, Any]) -> dict[str, Any]:
    n = len(words_of(body))
    return {"prompt_tokens": 7, "completion_tokens": n, "prompt_tokens_details": {"cached_tokens": 2}}
