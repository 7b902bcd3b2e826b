"""Small page pools for tests, their colours, and other processes that own some."""

import base64
import fcntl
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kilat.kv.transport import Done, Pages, Transport
from kilat.wire.kv import Endpoint, KvLayout, Offer

SECRET = "the deployment's secret"
LIMIT_S = 20.0
START_S = 90.0


def make_layout(page_bytes: int, model: str = "m") -> KvLayout:
    return KvLayout(1, 1, 1, page_bytes // 4, "bfloat16", page_bytes, model)


def make_pages(n: int, page_bytes: int, *, model: str = "m", shared: bool = False) -> Pages:
    """Page ``p`` is filled with colour ``p``."""
    fd = None
    if shared:
        fd = os.memfd_create("pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, n * page_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        memory = np.frombuffer(mmap.mmap(fd, n * page_bytes), np.uint8).reshape(n, page_bytes)
    else:
        memory = np.zeros((n, page_bytes), np.uint8)
    for p in range(n):
        memory[p] = color(p, page_bytes)
    return Pages(make_layout(page_bytes, model), memory, fd)


def color(k: int, page_bytes: int) -> np.ndarray:
    """Bytes that tell one page from another at every place."""
    return np.arange(k, k + page_bytes, dtype=np.uint64).astype(np.uint8) ^ np.uint8(k * 37 % 256)


def make_offer(
    pages: Sequence[int], *, move: str = "m0", owner: str = "a", checksums: Sequence[int] = ()
) -> Offer:
    return Offer(move, owner, 0, list(pages), 0, len(pages), 5.0, checksums=list(checksums))


def wait(transport: Transport, n: int = 1, limit_s: float = LIMIT_S) -> list[Done]:
    """The next ``n`` ends of reads. Raises TimeoutError when they do not come."""
    out: list[Done] = []
    until_s = time.monotonic() + limit_s
    while len(out) < n:
        if time.monotonic() > until_s:
            raise TimeoutError(f"{len(out)} of {n} reads ended within {limit_s} s")
        out += transport.poll()
        time.sleep(0.001)
    return out


class Owner:
    """An ``owner.py`` in a process of its own."""

    def __init__(self, *args: str, module: str = "tests.kv.owner") -> None:
        root = Path(__file__).parents[2]
        command = [sys.executable, "-m", module, *args]
        self.process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.endpoints = {
            kind: Endpoint(kind, base64.b64decode(text))
            for kind, text in json.loads(self._line(START_S)).items()
        }

    def tell(self, *words: object) -> None:
        """Send a command and wait for its answer."""
        self.send(*words)
        self.answer()

    def send(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> None:
        assert self._line().strip() == "ok"

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait(LIMIT_S)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _line(self, limit_s: float = LIMIT_S) -> str:
        out = self.process.stdout
        assert out is not None
        if not select.select([out], [], [], limit_s)[0]:
            raise TimeoutError("the owner does not answer")
        return out.readline().decode()
