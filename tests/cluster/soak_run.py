"""Sends the requests of a soak run to a server, judges the answers, and looks at what the server's processes hold."""

import asyncio
import json
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from tests.cluster.soak_traffic import CHAT, Ask, Traffic, what_is_wrong

TIMEOUT_S = 300.0
KEPT_PROBLEMS = 30
EARLY_S, LATE_S = 0.03, 0.6
LAZY_THREADS = 4  # pools start a thread when all of theirs are busy, up to their size


@dataclass
class Tally:
    """What came of the requests so far. ``problems`` has the first of them in words."""

    done: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    n_problems: int = 0
    texts: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    repeats: int = 0

    def problem(self, ask: Ask, what: str) -> None:
        self.n_problems += 1
        if len(self.problems) < KEPT_PROBLEMS:
            self.problems.append(f"request {ask.index} ({ask.kind}, {ask.path}): {what}")

    def judge(self, ask: Ask, texts: list[str], finishes: list[str | None], tokens: int) -> None:
        """Take a complete answer."""
        wrong = what_is_wrong(ask, texts, finishes)
        if wrong is not None:
            self.problem(ask, wrong)
        if not 0 <= tokens <= ask.samples * ask.max_tokens:
            self.problem(
                ask, f"usage has {tokens} tokens, at most {ask.samples * ask.max_tokens} were asked for"
            )
        first, before = self.texts.setdefault(ask.key, (ask.index, texts))
        self.repeats += first != ask.index
        if before != texts:
            self.problem(ask, f"says {texts!r}, the same request {first} was answered {before!r}")


class Clients:
    """``n`` clients that each send one request after the other, until ``first + count`` requests of ``traffic`` are sent."""

    def __init__(self, url: str, traffic: Traffic, tally: Tally, n: int) -> None:
        self.url, self.traffic, self.tally, self.n = url, traffic, tally, n
        self.host, port = url.removeprefix("http://").split(":")
        self.port = int(port)

    async def run(self, first: int, count: int) -> None:
        left = iter(range(first, first + count))
        limits = httpx.Limits(max_connections=self.n, max_keepalive_connections=self.n)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=TIMEOUT_S, limits=limits, trust_env=False
        ) as http:

            async def one_client() -> None:
                for index in left:
                    await self._one(http, self.traffic.ask(index))
                    self.tally.done += 1

            await asyncio.gather(*(one_client() for _ in range(self.n)))

    async def _one(self, http: httpx.AsyncClient, ask: Ask) -> None:
        try:
            if ask.cancel in ("reset", "half_body"):
                await self._raw(ask)
            elif ask.cancel in ("early", "late"):
                await self._give_up(http, ask)
            else:
                await self._whole(http, ask)
        except (httpx.HTTPError, OSError) as e:
            self.tally.problem(ask, f"{type(e).__name__}: {e}")

    # -- clients that wait --------------------------------------------------------------------------------------------------------

    async def _whole(self, http: httpx.AsyncClient, ask: Ask) -> None:
        """Send and read the answer; with ``cancel`` only some chunks of it."""
        async with http.stream(ask.method, ask.path, content=ask.body, headers=ask.headers) as r:
            if r.status_code != ask.status:
                self.tally.problem(
                    ask, f"status {r.status_code}, wanted {ask.status}: {(await r.aread())[:300]!r}"
                )
            if ask.cancel is not None:
                self.tally.outcomes[f"cancelled: {ask.cancel}"] += 1
                n_chunks = int(ask.moment * 6)
                async for _ in r.aiter_raw():
                    n_chunks -= 1
                    if n_chunks <= 0:
                        break
                return
            data = await r.aread()
            if r.status_code != 200:
                self._refused(ask, r, data)
            elif ask.stream:
                self._streamed(ask, data)
            else:
                self._answered(ask, json.loads(data))

    def _refused(self, ask: Ask, r: httpx.Response, data: bytes) -> None:
        self.tally.outcomes[f"status {r.status_code}"] += 1
        try:
            error = json.loads(data)["error"]
            complete = bool(error["message"]) and bool(error["code"]) and bool(error["type"])
        except (ValueError, KeyError, TypeError):
            complete = False
        if not complete:
            self.tally.problem(ask, f"the error has another form: {data[:300]!r}")

    def _answered(self, ask: Ask, body: dict[str, Any]) -> None:
        choices = sorted(body["choices"], key=lambda c: c["index"])
        texts = [c["message"]["content"] or "" if ask.path == CHAT else c["text"] for c in choices]
        finishes = [c["finish_reason"] for c in choices]
        self.tally.outcomes["answered"] += 1
        self.tally.judge(ask, texts, finishes, body["usage"]["completion_tokens"])

    def _streamed(self, ask: Ask, data: bytes) -> None:
        lines = [line[6:] for line in data.decode().split("\n\n") if line.startswith("data: ")]
        if not lines or lines[-1] != "[DONE]":
            self.tally.problem(ask, f"the stream ended without [DONE]: {lines[-1:]}")
            return
        texts, finishes = [""] * ask.samples, [None] * ask.samples
        tokens = -1
        for line in lines[:-1]:
            event = json.loads(line)
            for c in event["choices"]:
                texts[c["index"]] += (c["delta"].get("content") or "") if ask.path == CHAT else c["text"]
                finishes[c["index"]] = c["finish_reason"] or finishes[c["index"]]
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
        self.tally.outcomes["streamed"] += 1
        self.tally.judge(ask, texts, finishes, tokens)

    # -- clients that leave -------------------------------------------------------------------------------------------------------

    async def _give_up(self, http: httpx.AsyncClient, ask: Ask) -> None:
        """Drop the request after a while, wherever it is by then."""
        limit_s = ask.moment * (EARLY_S if ask.cancel == "early" else LATE_S)
        try:
            async with asyncio.timeout(limit_s):
                r = await http.request(ask.method, ask.path, content=ask.body, headers=ask.headers)
        except TimeoutError:
            self.tally.outcomes[f"cancelled: {ask.cancel}"] += 1
        else:
            self.tally.outcomes["answered before it was cancelled"] += 1
            if r.status_code != 200:
                self.tally.problem(ask, f"status {r.status_code}: {r.content[:300]!r}")

    async def _raw(self, ask: Ask) -> None:
        """A socket of its own: closed in the middle of the body, or reset at some moment after it."""
        _, writer = await asyncio.open_connection(self.host, self.port)
        try:
            head = (
                f"{ask.method} {ask.path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(ask.body)}\r\n\r\n"
            )
            body = ask.body if ask.cancel == "reset" else ask.body[: int(ask.moment * len(ask.body))]
            writer.write(head.encode() + body)
            await writer.drain()
            await asyncio.sleep(ask.moment * LATE_S)
            self.tally.outcomes[f"cancelled: {ask.cancel}"] += 1
            if ask.cancel == "reset":
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        finally:
            writer.close()


# -- the server's processes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Holdings:
    """What the two processes hold at one moment."""

    tasks: int
    gateway_fds: int
    worker_fds: int
    gateway_threads: int
    worker_threads: int


@dataclass(frozen=True)
class Size:
    """Memory of the two processes after ``done`` requests, in bytes."""

    done: int
    gateway: int
    worker: int


class Server:
    """A running server, seen from outside. ``pid`` is its gateway."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.gateway = psutil.Process(pid)
        workers = [p for p in self.gateway.children() if "kilat.cluster.worker" in " ".join(p.cmdline())]
        assert len(workers) == 1, f"{len(workers)} workers below the gateway"
        self.worker = workers[0]
        # one connection for all questions: whether an old one is closed yet must not change what the gateway holds
        self._http = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def metrics(self) -> dict[str, float]:
        """All metrics; labels are part of the name."""
        text = self._http.get("/metrics").text
        return {m[1]: float(m[2]) for m in re.finditer(r"^(\w+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)}

    def is_idle(self, m: dict[str, float]) -> bool:
        names = (
            "requests_open",
            "sessions_open",
            "sessions_running",
            "sessions_waiting",
            "sessions_compiling",
        )
        return all(m[f"kilat_{name}"] == 0 for name in names) and m["kilat_pages_used"] == 0

    def holdings(self) -> Holdings:
        return Holdings(
            int(self.metrics()["kilat_gateway_tasks"]),
            self.gateway.num_fds(),
            self.worker.num_fds(),
            self.gateway.num_threads(),
            self.worker.num_threads(),
        )

    def size(self, done: int) -> Size:
        return Size(done, self.gateway.memory_info().rss, self.worker.memory_info().rss)


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether ``condition()`` held within the time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def leaks(server: Server, before: Holdings, *, timeout_s: float) -> list[str]:
    """What an idle server holds that it did not before, after it has had time to let go."""
    found = []
    if not wait_until(lambda: server.is_idle(server.metrics()), timeout_s):
        found.append(f"not idle after {timeout_s:g} s: {_interesting(server.metrics())}")
    m = server.metrics()
    finished = sum(v for k, v in m.items() if k.startswith("kilat_sessions_finished_"))
    if finished != m["kilat_sessions_submitted_total"]:
        found.append(f"{m['kilat_sessions_submitted_total']:g} sessions submitted, {finished:g} finished")
    for name in ("kilat_bad_frames_total", "kilat_slow_readers_total", "kilat_worker_restarts_total"):
        if m[name]:
            found.append(f"{name} is {m[name]:g}")
    broken = {k: v for k, v in m.items() if k.startswith("kilat_requests_total") and 'status="5' in k}
    if broken:
        found.append(f"answers with 5xx: {broken}")

    def more() -> dict[str, tuple[int, int]]:
        now = server.holdings()
        pairs = {n: (getattr(before, n), getattr(now, n)) for n in Holdings.__dataclass_fields__}
        return {n: (a, b) for n, (a, b) in pairs.items() if b > a + LAZY_THREADS * n.endswith("_threads")}

    if not wait_until(lambda: not more(), timeout_s):
        found.append(f"more than before (before, now): {more()}")
    return found


def _interesting(m: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in m.items() if re.match(r"kilat_(sessions|requests_open|pages)", k) and v}
