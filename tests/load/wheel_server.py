"""A package index on loopback that can misbehave: it drops, refuses, lies and stalls on request."""

import hashlib
import io
import json
import threading
import zipfile
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kilat.load.catalogue import CatalogueModel, Wheel


@dataclass(frozen=True)
class Fault:
    """What happens to one request for a file; ``after`` bytes of the body are sent first."""

    drop: bool = False
    stall: bool = False
    after: int = 0
    status: int = 0
    ignore_range: bool = False
    content: bytes | None = None
    content_range: str | None = None


@dataclass
class Index:
    """``files`` by package and name. ``faults`` are used up by file requests in order; ``requests`` logs (path, Range)."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    html: bool = False
    login: str | None = None
    url: str = ""
    sent_bytes: int = 0
    stalled: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def file_requests(self) -> list[tuple[str, str | None]]:
        return [(path, span) for path, span in self.requests if path.startswith("/files/")]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    index: Index

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        index = self.index
        index.requests.append((self.path, self.headers.get("Range")))
        parts = self.path.strip("/").split("/")
        if index.login is not None and self.headers.get("Authorization") != index.login:
            return self._answer(401, b"")
        if parts[0] == "simple" and parts[1] in index.files:
            return self._page(parts[1])
        if parts[0] == "files" and parts[2] in index.files.get(parts[1], {}):
            return self._file(index.files[parts[1]][parts[2]])
        return self._answer(404, b"nothing here")

    def _page(self, package: str) -> None:
        names = list(self.index.files[package])
        if self.index.html:
            links = "".join(f'<a href="../../files/{package}/{n}#sha256=0">{n}</a><br>' for n in names)
            return self._answer(200, f"<html><body>{links}</body></html>".encode(), type="text/html")
        listed = [{"filename": n, "url": f"../../files/{package}/{n}", "hashes": {}} for n in names]
        body = json.dumps({"files": listed, "meta": {"api-version": "1.1"}}).encode()
        return self._answer(200, body, type="application/vnd.pypi.simple.v1+json")

    def _file(self, content: bytes) -> None:
        fault = self.index.faults.pop(0) if self.index.faults else Fault()
        if fault.status:
            return self._answer(fault.status, b"")
        if fault.content is not None:
            content = fault.content
        span = self.headers.get("Range")
        first = int(span.removeprefix("bytes=").removesuffix("-")) if span and not fault.ignore_range else 0
        if first >= len(content):
            return self._answer(416, b"", range=f"bytes */{len(content)}")
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(content) - first))
        if first:
            given = fault.content_range or f"bytes {first}-{len(content) - 1}/{len(content)}"
            self.send_header("Content-Range", given)
        self.end_headers()
        cut = fault.after if fault.drop or fault.stall else len(content)
        self._send(content[first : first + cut])
        if fault.stall:
            self.index.stalled.set()
            self.index.go_on.wait(30)
        if fault.drop or fault.stall:
            self.close_connection = True
        return None

    def _send(self, body: bytes) -> None:
        self.wfile.write(body)
        self.wfile.flush()
        self.index.sent_bytes += len(body)

    def _answer(self, status: int, body: bytes, type: str = "text/plain", range: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", type)
        self.send_header("Content-Length", str(len(body)))
        if range:
            self.send_header("Content-Range", range)
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is part of the tests."""


class Running:
    """Serves ``index`` on a free port until the block ends."""

    def __init__(self, index: Index) -> None:
        self.index = index
        handler = type("Handler", (_Handler,), {"index": index})
        self.server = _Server(("127.0.0.1", 0), handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        index.url = f"http://127.0.0.1:{self.server.server_port}/simple"

    def __enter__(self) -> Index:
        self.thread.start()
        return self.index

    def __exit__(self, *exc: object) -> None:
        self.index.go_on.set()
        self.server.shutdown()
        self.thread.join(10)
        self.server.server_close()


def publish(index: Index, content: bytes, n_parts: int = 1, name: str = "tiny") -> CatalogueModel:
    """Put ``content`` on the index as ``n_parts`` wheels; the catalogue entry that describes it."""
    size = -(-len(content) // n_parts)
    wheels = []
    for i in range(n_parts):
        member = f"part{i}/data.bin"
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, content[i * size : (i + 1) * size])
        raw = packed.getvalue()
        wheel = Wheel(f"{name}-part{i}", "1.0", len(raw), hashlib.sha256(raw).hexdigest(), member)
        index.files[wheel.package] = {wheel.file.name: raw}
        wheels.append(wheel)
    digest = hashlib.sha256(content).hexdigest()
    return CatalogueModel(name, "a test", "none", len(content), digest, tuple(wheels))
