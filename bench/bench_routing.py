"""Replay of public traces through the router: how many blocks of prompts are found in caches, against simpler ways to choose a worker.

    python -m bench.bench_routing [TRACE.jsonl.gz ...] [--workers 8] [--blocks 500 1500 5000 15000 50000] [--json FILE]

A trace is one of Mooncake's (a line per request: timestamp in ms, input_length, output_length, hash_ids of 512-token blocks). Requests
come at their times. Each worker computes prompts one after another at --rate tokens/s and holds a request's blocks until its output has
been written at --tpot seconds a token; then they stay in its cache (the real PagePool) of --blocks blocks until others need them. The
index hears of changes 20 ms later. Reading a block of a peer takes --block-ms.

Policies: ours, ours without lending between workers, round-robin, least-loaded (fewest prompt tokens that wait, then fewest sessions).
Hits are blocks not computed: found in the worker's own cache, or lent by a peer. ``endless``: hits of one memory that never forgets and
knows a prompt the moment it arrives. TTFT is queue and prefill.

First the index alone: a lookup of 512 names (8,192 tokens in pages of 16) among 1,000 such chains, held by 1, 8 and 32 workers to
depths and in an order of their own; every chain is asked for once, with names that are not in any processor cache (goal: 50 us). The index was told
of them in whole lists, or in messages of chunks: each with the next 32 pages of 4 chains.
"""

import argparse
import gzip
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kilat.cli.report import Subject, envelope, print_table, write_json
from kilat.policy.cache.changes import PageChanges
from kilat.policy.cache.pool import PagePool
from kilat.policy.route.config import RouterConfig
from kilat.policy.route.index import PrefixIndex
from kilat.policy.route.loads import Loads
from kilat.policy.route.router import Router
from kilat.policy.route.views import Route, RouteRequest, WorkerView
from kilat.sim.agenda import Agenda
from kilat.wire.messages import PagesChanged

BLOCK = 512
INDEX_DELAY_S = 0.02
POLICIES = ("ours", "ours, no lending", "round-robin", "least-loaded")


@dataclass(frozen=True)
class Request:
    number: int
    at_s: float
    n_prompt: int
    n_output: int
    names: list[bytes]


@dataclass(frozen=True)
class Speed:
    """Tokens of prompt per second, seconds per output token and per step, seconds to read a peer's block."""

    rate: float
    tpot_s: float
    block_s: float


def read_trace(path: Path) -> list[Request]:
    requests = []
    with gzip.open(path, "rt") as lines:
        for i, line in enumerate(lines):
            r = json.loads(line)
            names = [n.to_bytes(16, "little") for n in r["hash_ids"]]
            requests.append(Request(i, r["timestamp"] / 1e3, r["input_length"], r["output_length"], names))
    return requests


def endless(requests: list[Request]) -> float:
    """Share of blocks that an endless memory has."""
    seen: set[bytes] = set()
    n_hit = 0
    for r in requests:
        n_hit += next((i for i, name in enumerate(r.names) if name not in seen), len(r.names))
        seen.update(r.names)
    return n_hit / sum(len(r.names) for r in requests)


@dataclass
class Job:
    request: Request
    lend_from: str | None
    pages: list[int] = field(default_factory=list)


@dataclass
class Totals:
    blocks: int = 0
    own: int = 0
    lent: int = 0
    ttft_s: list[float] = field(default_factory=list)
    choose_s: list[float] = field(default_factory=list)


class Node:
    """One worker: prompts in the order they came, then outputs beside them."""

    def __init__(self, worker_id: str, n_blocks: int, replay: "Replay") -> None:
        self.worker_id = worker_id
        self.pool = PagePool(n_blocks, BLOCK)
        self.pool.changes = PageChanges()
        self.replay = replay
        self.queue: deque[Job] = deque()
        self.is_busy = False
        self.n_told = 0

    def give(self, job: Job) -> None:
        self.queue.append(job)
        self.next()

    def next(self) -> None:
        """Begin with the prompt at the head of the queue, when there is room for it."""
        if self.is_busy or not self.queue:
            return
        r, totals, speed = self.queue[0].request, self.replay.totals, self.replay.speed
        hits = self.pool.match(r.names)
        n_pages = max(len(r.names), -(-(r.n_prompt + r.n_output) // BLOCK))
        if n_pages - len(hits) + self.pool.n_cached_of(hits) > self.pool.n_available:
            return
        job = self.queue.popleft()
        self.pool.share(hits)
        job.pages = hits + [
            page for _ in range(n_pages - len(hits)) if (page := self.pool.take()) is not None
        ]
        n_lent = 0
        if job.lend_from is not None:
            n_lent = max(len(self.replay.nodes[job.lend_from].pool.match(r.names)) - len(hits), 0)
        totals.blocks += len(r.names)
        totals.own += len(hits)
        totals.lent += n_lent
        n_left = max(r.n_prompt - (len(hits) + n_lent) * BLOCK, 1)
        self.is_busy = True
        self.tell()
        self.replay.agenda.after(n_lent * speed.block_s + n_left / speed.rate, lambda: self.computed(job))

    def computed(self, job: Job) -> None:
        r = job.request
        self.is_busy = False
        for page, name in zip(job.pages, r.names):
            self.pool.seal(page, name)
        self.replay.totals.ttft_s.append(self.replay.agenda.now_s - r.at_s)
        self.replay.loads.first_token(str(r.number))
        self.tell()
        self.replay.agenda.after(r.n_output * self.replay.speed.tpot_s, lambda: self.done(job))
        self.next()

    def done(self, job: Job) -> None:
        self.pool.release(job.pages)
        self.replay.loads.ended(str(job.request.number))
        self.next()

    def tell(self) -> None:
        stored, dropped = self.pool.changes.take()
        message = PagesChanged(self.n_told, stored, dropped)
        self.n_told += 1
        self.replay.agenda.after(
            INDEX_DELAY_S, lambda: self.replay.router.index.apply(self.worker_id, message)
        )


class Replay:
    """One trace, one policy, one size of caches."""

    def __init__(self, policy: str, n_workers: int, n_blocks: int, speed: Speed) -> None:
        self.speed = speed
        self.agenda = Agenda()
        self.loads = Loads()
        self.totals = Totals()
        lends = policy != "ours, no lending"
        config = RouterConfig(move_s=0.0 if lends else 1e9, page_move_s=speed.block_s, dead_after_s=1e9)
        self.router = Router(config)
        self.nodes = {f"w{i}": Node(f"w{i}", n_blocks, self) for i in range(n_workers)}
        self._turn = 0
        choices: dict[str, Callable[[Request], Route]] = {
            "round-robin": self.round_robin,
            "least-loaded": self.least_loaded,
        }
        self.choose = choices.get(policy, self.ours)

    def run(self, requests: list[Request]) -> Totals:
        for r in requests:
            self.agenda.after(r.at_s, lambda r=r: self.arrive(r))
        self.agenda.run(requests[-1].at_s + 3600.0, max_calls=10_000_000)
        assert len(self.totals.ttft_s) == len(requests)
        return self.totals

    def arrive(self, r: Request) -> None:
        begin = time.perf_counter()
        route = self.choose(r)
        self.totals.choose_s.append(time.perf_counter() - begin)
        self.loads.sent(str(r.number), route.worker, None, route.why.get("tokens_left", r.n_prompt))
        self.nodes[route.worker].give(Job(r, route.lend_from))

    def ours(self, r: Request) -> Route:
        request = RouteRequest(str(r.number), max(r.n_prompt, 1), r.names, BLOCK)
        return self.router.choose(request, [self.view(n) for n in self.nodes.values()], 0.0)

    def view(self, node: Node) -> WorkerView:
        load = self.loads.of(node.worker_id)
        return WorkerView(
            node.worker_id,
            running=load.running,
            waiting=load.waiting,
            free_pages=node.pool.n_available,
            n_pages=node.pool.n_pages,
            queued_prompt_tokens=load.queued_prompt_tokens,
            prefill_tokens_per_s=self.speed.rate,
            step_s=self.speed.tpot_s,
        )

    def round_robin(self, r: Request) -> Route:
        self._turn += 1
        return Route(f"w{self._turn % len(self.nodes)}")

    def least_loaded(self, r: Request) -> Route:
        def load(worker_id: str) -> tuple[int, int]:
            load = self.loads.of(worker_id)
            return load.queued_prompt_tokens, load.running + load.waiting

        return Route(min(self.nodes, key=load))


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]


def measure(path: Path, args: argparse.Namespace, speed: Speed) -> list[dict[str, Any]]:
    requests = read_trace(path)[: args.requests]
    best, unique = endless(requests), len({n for r in requests for n in r.names})
    rows = []
    for n_blocks in args.blocks:
        for policy in POLICIES:
            t = Replay(policy, args.workers, n_blocks, speed).run(requests)
            hit = (t.own + t.lent) / t.blocks
            rows.append(
                {
                    "trace": path.name.split(".")[0],
                    "blocks_per_worker": n_blocks,
                    "policy": policy,
                    "hit": hit,
                    "own_hit": t.own / t.blocks,
                    "endless": best,
                    "of_endless": hit / best,
                    "fits": n_blocks * args.workers >= unique,
                    "ttft_p50_s": quantile(t.ttft_s, 0.5),
                    "ttft_p90_s": quantile(t.ttft_s, 0.9),
                    "choose_us": quantile(t.choose_s, 0.5) * 1e6,
                }
            )
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    title = (
        f"{path.name}: {len(requests):,} requests, {unique:,} blocks, endless memory {best:.1%}; "
        f"{args.workers} workers of {speed.rate:,.0f} tokens/s"
    )
    lines = [
        [
            f"{r['blocks_per_worker']:,}{' (all fit)' if r['fits'] else ''}",
            r["policy"],
            f"{r['hit']:.1%}",
            f"{r['own_hit']:.1%}",
            f"{r['of_endless']:.1%}",
            f"{r['ttft_p50_s']:.2f}",
            f"{r['ttft_p90_s']:.2f}",
            f"{r['choose_us']:.0f}",
        ]
        for r in rows
    ]
    columns = ["blocks/worker", "policy", "hits", "own", "of endless", "TTFT p50 s", "p90 s", "choose us"]
    print_table(title, columns, lines, n_text=2)
    return rows


def tell_whole(index: PrefixIndex, worker: str, held: list[list[bytes]]) -> None:
    index.apply(worker, PagesChanged(0, [name for names in held for name in names], []))


def tell_chunks(index: PrefixIndex, worker: str, held: list[list[bytes]]) -> None:
    seq = 0
    for i in range(0, len(held), 4):
        for first in range(0, 512, 32):
            stored = [name for names in held[i : i + 4] for name in names[first : first + 32]]
            index.apply(worker, PagesChanged(seq, stored, []))
            seq += 1


def lookups() -> list[dict[str, Any]]:
    """Median and 99th percentile of ``PrefixIndex.holders``, in microseconds."""
    rows = []
    for told, tell in (("whole lists", tell_whole), ("chunks", tell_chunks)):
        for n_workers in (1, 8, 32):
            rng = random.Random(0)
            index = PrefixIndex()
            chains = [[rng.randbytes(16) for _ in range(512)] for _ in range(1000)]
            for i in range(n_workers):
                order = rng.sample(chains, len(chains))
                tell(index, f"w{i}", [chain[: rng.randint(1, 512)] for chain in order])
            times = []
            for chain in chains:
                names = [bytes(bytearray(name)) for name in chain]
                begin = time.perf_counter()
                index.holders(names)
                times.append((time.perf_counter() - begin) * 1e6)
            row = {"told": told, "holders": n_workers}
            rows.append({**row, "p50_us": quantile(times, 0.5), "p99_us": quantile(times, 0.99)})
    lines = [[r["told"], str(r["holders"]), f"{r['p50_us']:.1f}", f"{r['p99_us']:.1f}"] for r in rows]
    columns = ["told in", "holders", "p50 us", "p99 us"]
    print_table("PrefixIndex.holders, 512 names (goal 50 us)", columns, lines, n_text=1)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--blocks", type=int, nargs="+", default=[500, 1500, 5000, 15000, 50000])
    parser.add_argument("--rate", type=float, default=12_000.0)
    parser.add_argument("--tpot", type=float, default=0.03)
    parser.add_argument("--block-ms", type=float, default=6.4)
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.kind, args.seed = "routing", 0
    speed = Speed(args.rate, args.tpot, args.block_ms / 1e3)
    index_rows = lookups()
    rows = [row for path in args.traces for row in measure(path, args, speed)]
    shapes = {
        "workers": args.workers,
        "block_tokens": BLOCK,
        "prefill_tokens_per_s": speed.rate,
        "tpot_s": speed.tpot_s,
        "block_move_s": speed.block_s,
    }
    subject = Subject("none (simulated)", None, None, 1, None)
    write_json(args.json, envelope(args, subject, shapes=shapes, lookups=index_rows, rows=rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
