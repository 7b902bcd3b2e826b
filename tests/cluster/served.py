"""Starts a gateway with a fake worker as real processes, and looks inside them from outside."""

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parent
START_S = 60.0
LONG: dict[str, Any] = {"prompt": "tell me a long story", "max_tokens": 450, "stream": True}
# Much JSON per token, so that the buffers of the system between the two are full soon.
BULKY: dict[str, Any] = {"prompt": "tell me", "max_tokens": 100_000, "stream": True, "logprobs": 20}


class Served:
    """One server. ``url`` is known once it is ready; ``stop()`` must be called. ``inside``: a command that runs it."""

    def __init__(
        self,
        folder: Path,
        model_path: Path,
        *,
        wait: bool = True,
        env: dict[str, str] | None = None,
        inside: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.folder = folder
        self.log_path = folder / "log"
        settings = folder / "options.json"
        settings.write_text(json.dumps({"model_path": str(model_path), **options}))
        self._log = self.log_path.open("wb")
        self.process = subprocess.Popen(
            [*inside, sys.executable, str(HERE / "serve_fake.py"), str(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "KILAT_LOG": "info", **(env or {})},
        )
        self.url = ""
        if wait:
            try:
                self.wait_ready()
            except BaseException:
                self.stop()
                raise

    def wait_ready(self) -> None:
        line = self._line(START_S)
        found = re.search(r"http://\S+?(?=/v1)", line)
        assert found, f"no ready line but {line!r}; log:\n{self.log()}"
        self.url = found.group()

    def _line(self, timeout_s: float) -> str:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(timeout_s), f"no output within {timeout_s} s; log:\n{self.log()}"
        return self.process.stdout.readline().decode()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def worker_pid(self) -> int:
        """Pid of the youngest worker."""
        return int(re.findall(r"worker_started pid=(\d+)", self.log())[-1])

    def pid_of(self, name: str) -> int:
        """Pid of the youngest worker of this name."""
        return int(re.findall(rf"worker_started pid=(\d+) worker={name}\.", self.log())[-1])

    def workers(self) -> dict[str, dict[str, Any]]:
        """What the server says of each worker, by name."""
        body = httpx.get(f"{self.url}/cluster/workers", timeout=10).json()
        return {w["name"]: w for w in body["workers"]}

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        assert found, f"{name} is not in\n{text}"
        return float(found.group(1))

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        """The exit code."""
        return self.process.wait(timeout_s)

    def stop(self) -> None:
        """Make it end, whatever state it is in."""
        # The second time it does not wait for answers; a server that was killed leaves its folder for temporary files behind.
        for ask_to_end, patience_s in (
            (self.process.terminate, 0.3),
            (self.process.terminate, 10.0),
            (self.process.kill, 10.0),
        ):
            if self.process.poll() is None:
                ask_to_end()
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(patience_s)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self._log.close()


def eventually(condition: Callable[[], bool], what: str, *, timeout_s: float = 20.0) -> None:
    """Wait until ``condition()`` holds; fails the test with ``what`` when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def text_of(answer: httpx.Response) -> str:
    """Text of the first choice of a completion."""
    return answer.json()["choices"][0]["text"]


def ask(server: Served, prompt: str = "say:fine", **fields: Any) -> httpx.Response:
    """One completion."""
    return httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt, **fields}, timeout=30)


def errors_in(data: bytes) -> list[dict[str, Any]]:
    """The error events of a stream."""
    found = re.findall(rb'data: (\{"error".*?\})\n\n', data)
    return [json.loads(f)["error"] for f in found]


class Stream:
    """A streamed request on a socket of its own, read only when asked."""

    def __init__(self, server: Served, body: dict[str, Any], *, buffer_bytes: int | None = None) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        if buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.socket.settimeout(30)
        self.socket.connect((host, int(port)))
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self.socket.sendall(head.encode() + data)

    def read_some(self) -> bytes:
        return self.socket.recv(4096)

    def read_to_end(self) -> bytes:
        """Until the end of the chunked body or of the connection."""
        got = b""
        while not got.endswith(b"0\r\n\r\n"):
            chunk = self.socket.recv(65536)
            if not chunk:
                break
            got += chunk
        return got

    def close(self) -> None:
        self.socket.close()
