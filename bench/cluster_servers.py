"""Servers that bench_cluster.py starts, or finds running."""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from kilat.cli.server import ChildServer

START_S = 300.0
POOL_BYTES = 1_500_000_000
SETTLE_S = 5.0
"""Of idleness after the start, in which workers get their pools' memory from the system."""


class Server:
    """A server of this bench; ``close`` ends it."""

    def __init__(self, args: argparse.Namespace, *options: str) -> None:
        fixed = "--port 0 --drain-timeout 20 --stop-at-stdin-end --kv-cache-memory-bytes"
        command = [
            sys.executable,
            "-m",
            "kilat.cli",
            "serve",
            args.model,
            *fixed.split(),
            str(POOL_BYTES),
            *options,
        ]
        self._child = ChildServer(command)
        self.url = self._child.wait_ready(START_S)
        n = int(options[1]) + (int(options[3]) if len(options) > 2 and options[2] == "--decode" else 0)
        deadline_s = time.monotonic() + START_S
        while sum(w["state"] == "ready" for w in self.workers().values()) < n:
            assert time.monotonic() < deadline_s, "not all workers came"
            time.sleep(0.2)

    def close(self) -> None:
        self._child.stop()

    def workers(self) -> dict[str, dict[str, Any]]:
        body = httpx.get(f"{self.url}/cluster/workers", timeout=30, trust_env=False).json()
        return {w["name"]: w for w in body["workers"]}

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).text
        return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


@dataclass(frozen=True)
class Peer:
    """A server of somebody else, which runs already."""

    url: str


@contextmanager
def serving(args: argparse.Namespace, **kinds: tuple[str, ...]) -> Iterator[dict[str, Server]]:
    servers: dict[str, Server] = {}
    try:
        for name, options in kinds.items():
            servers[name] = Server(args, *options)
        time.sleep(SETTLE_S)
        yield servers
    finally:
        for server in servers.values():
            server.close()
