"""Ten thousand mixed requests to a real server, a third of them given up or bad; afterwards nothing may be left of them.

    python -m bench.soak [--requests 10000] [--clients 48] [--model smollm2] [--json FILE]

Run from the root of the repository: the traffic is the one of tests/cluster (soak_traffic.py says what is in it). The server is
`kilat serve` with a page pool far smaller than its sessions would like, so that they wait, evict and preempt. The same traffic with
another seed warms it up; then the run. Fails when

    an answer is wrong: status, form, finish reason, usage, or another text than the same request got before
    a session, page, request, task, file descriptor or thread is left a while after the last request
    the memory of gateway or worker still grows in the second half (slope of a straight line through its samples)
    the server said anything in its log above notice
"""

import argparse
import asyncio
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kilat.base import env
from kilat.cli.fetch import fetch
from kilat.cli.report import Subject, envelope, print_table, write_json
from tests.cluster.soak_run import Clients, Server, Size, Tally, leaks, wait_until
from tests.cluster.soak_traffic import Traffic

START_S, SETTLE_S, SAMPLE_S = 120.0, 60.0, 0.5
WARM_UP = 400
GROWTH_LIMIT = 2 * 2**20  # bytes per 1,000 requests in the second half
NOISE = ("Traceback", "never retrieved", "never awaited", "was destroyed", "ResourceWarning", " E ")
MIB = 2**20


@contextlib.contextmanager
def serving(args: argparse.Namespace, log: Path) -> Iterator[tuple[str, int]]:
    """(URL, pid of the gateway) of a server that logs to ``log``."""
    command = [sys.executable, "-m", "kilat.cli", "serve", args.model, "--port", "0", "--stop-at-stdin-end"]
    command += ["--kv-cache-memory-bytes", args.kv_cache, "--max-num-seqs", str(args.max_num_seqs)]
    command += ["--max-model-len", str(args.max_model_len)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            env=env.child_environment(KILAT_LOG="warning"),
        )
        try:
            ready = re.compile(r"^ready: .* at (http://\S+)/v1", re.MULTILINE)
            assert wait_until(lambda: ready.search(log.read_text()) is not None, START_S), log.read_text()
            found = ready.search(log.read_text())
            assert found is not None
            yield found[1], process.pid
            process.terminate()
            status = process.wait(60)
            assert status == 0, f"the server ended with status {status}: {log.read_text()[-2000:]}"
        finally:
            process.kill()
            process.wait(30)


async def sample_sizes(server: Server, tally: Tally, sizes: list[Size], every: int) -> None:
    """Take the sizes now and then, and tell how far the run is."""
    shown = 0
    while True:
        sizes.append(server.size(tally.done))
        if tally.done >= shown + every:
            shown = tally.done
            m = server.metrics()
            pages = ", ".join(f"{x} {m[f'kilat_pages_{x}']:g}" for x in ("used", "cached", "free"))
            sessions = f"{m['kilat_sessions_running']:g} run, {m['kilat_sessions_waiting']:g} wait"
            print(
                f"{tally.done:>6} done, {tally.n_problems} problems; sessions {sessions}; pages {pages}; "
                f"MiB gateway {sizes[-1].gateway / MIB:.1f}, worker {sizes[-1].worker / MIB:.1f}",
                flush=True,
            )
        await asyncio.sleep(SAMPLE_S)


async def load(server: Server, clients: Clients, first: int, count: int, every: int) -> list[Size]:
    """Send ``count`` requests; the sizes meanwhile."""
    sizes: list[Size] = []
    sampling = asyncio.create_task(sample_sizes(server, clients.tally, sizes, every))
    try:
        await clients.run(first, count)
    finally:
        sampling.cancel()
    return sizes


def slopes(sizes: list[Size]) -> dict[str, float]:
    """Bytes per 1,000 requests in the second half, of both processes."""
    half = [s for s in sizes if s.done >= sizes[-1].done / 2]
    done = [s.done / 1000 for s in half]
    return {
        name: statistics.linear_regression(done, [getattr(s, name) for s in half]).slope
        for name in ("gateway", "worker")
    }


def soak(args: argparse.Namespace, log: Path) -> tuple[dict[str, Any], list[str]]:
    """The figures and what is wrong."""
    name = fetch(args.model).name
    tally = Tally()
    with serving(args, log) as (url, pid):
        server = Server(url, pid)
        traffic = Traffic(args.seed, name, context_words=2 * args.max_model_len)
        warm = Traffic(args.seed + 1, name, context_words=2 * args.max_model_len)
        warm_tally = Tally()
        asyncio.run(Clients(url, warm, warm_tally, args.clients).run(0, WARM_UP))
        assert wait_until(lambda: server.is_idle(server.metrics()), SETTLE_S), "not idle after the warm-up"
        before, start = server.holdings(), server.metrics()
        began = time.monotonic()
        clients = Clients(url, traffic, tally, args.clients)
        sizes = asyncio.run(load(server, clients, 0, args.requests, max(args.requests // 20, 50)))
        took_s = time.monotonic() - began
        wrong = warm_tally.problems + tally.problems + leaks(server, before, timeout_s=SETTLE_S)
        after, holdings = server.metrics(), server.holdings()
        sizes.append(server.size(tally.done))
        server.close()
    growth = slopes(sizes)
    wrong += [
        f"memory of the {who} grows by {slope / MIB:.2f} MiB per 1,000 requests in the second half"
        for who, slope in growth.items()
        if slope > GROWTH_LIMIT
    ]
    wrong += [f"log: {line}" for line in log.read_text().splitlines() if any(n in line for n in NOISE)][:20]
    counted = ("preemptions", "wasted_tokens", "prefix_hit_tokens", "prompt_tokens", "output_tokens")
    figures = {
        "requests": args.requests,
        "seconds": took_s,
        "outcomes": dict(sorted(tally.outcomes.items())),
        "repeated_answers": tally.repeats,
        "different_requests": len(tally.texts),
        "problems": len(wrong) + max(0, tally.n_problems - len(tally.problems)),
        "counters": {c: after[f"kilat_{c}_total"] - start[f"kilat_{c}_total"] for c in counted},
        "pages": {x: after[f"kilat_pages_{x}"] for x in ("used", "cached", "free")},
        "holdings": {
            n: {"before": getattr(before, n), "after": getattr(holdings, n)}
            for n in before.__dataclass_fields__
        },
        "rss_mib": {
            who: {
                "start": getattr(sizes[0], who) / MIB,
                "half": getattr(sizes[len(sizes) // 2], who) / MIB,
                "end": getattr(sizes[-1], who) / MIB,
                "slope_per_1000_requests": slope / MIB,
            }
            for who, slope in growth.items()
        },
    }
    return figures, wrong


def show(figures: dict[str, Any], wrong: list[str]) -> None:
    lines = [[k, str(v)] for k, v in figures["outcomes"].items()]
    print_table(
        f"{figures['requests']} requests in {figures['seconds']:.0f} s", ("outcome", "requests"), lines
    )
    lines = [[k, str(v["before"]), str(v["after"])] for k, v in figures["holdings"].items()]
    print_table("held by the idle server", ("", "before", "after"), lines)
    lines = [[k, *(f"{x:.2f}" for x in v.values())] for k, v in figures["rss_mib"].items()]
    print_table("MiB resident", ("", "start", "half", "end", "per 1,000 requests"), lines)
    print(f"repeated answers, all equal: {figures['repeated_answers']}; counters: {figures['counters']}")
    print(f"pages: {figures['pages']}")
    print("\n".join(f"WRONG: {w}" for w in wrong) or "nothing wrong")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--kv-cache", default="12MiB")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.kind = "soak"
    settings = {k: getattr(args, k) for k in ("clients", "kv_cache", "max_num_seqs", "max_model_len")}
    # now, for the commit may be another one when the run ends
    document = envelope(args, Subject(args.model, "cpu", None, None, None), settings=settings)
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        figures, wrong = soak(args, Path(folder) / "log")
    show(figures, wrong)
    load.append(os.getloadavg()[0])
    write_json(args.json, {**document, "load_1m_before_after": load, "results": figures, "wrong": wrong})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
