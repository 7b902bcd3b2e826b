"""What prefill and decode apart, moves of pages and a shared prefix cost and gain, over HTTP with a real model on two cores.

    python bench/bench_cluster.py [--only interference,hand_over,prefix,moves] [--model smollm2] [--json FILE]

Workers are processes that are bound to cores; gateway and this client take what is left of them. Arms alternate, figures are medians
over rounds (min-max).

interference  16 streams decode; 4,000-token prompts (and 3 tokens more) keep arriving, one after the other. Time between tokens and time to the first token of
              the prompts: one prefill and one decode worker with a core each, one unified worker with two, each also without prompts.
hand_over     one 4,000-token prompt at a time: through prefill -> decode against a plain worker with one core; bytes that were moved
              against the pages of the prompt.
prefix        four workers, a new 2,000-token system prompt each round: one request that computes it, then others one by one
              while those before still run; the first one that each further worker gets is a hit through the index.
moves         two workers, 4 streams each; one worker is drained: the longest pauses of as many streams as move, in steps.
"""

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from cluster_servers import POOL_BYTES, Peer, Server, serving

from kilat.cli.client import Client
from kilat.cli.fetch import fetch
from kilat.cli.measures import spread
from kilat.cli.report import Subject, envelope, print_table, write_json

PAGE_TOKENS = 16
VOCAB = range(1000, 40_000)
SECTIONS = ("interference", "hand_over", "prefix", "moves")


def body_of(args: argparse.Namespace, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": args.name,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


async def tokens(client: Client, body: dict[str, Any]) -> AsyncIterator[float]:
    """When each chunk with text came."""
    async for chunk in client.stream("/v1/completions", body):
        if chunk.text:
            yield chunk.at_s


async def follow(client: Client, body: dict[str, Any], times: list[float]) -> None:
    async for at_s in tokens(client, body):
        times.append(at_s)


def ids(draw: random.Random, n: int) -> list[int]:
    return [draw.choice(VOCAB) for _ in range(n)]


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


# -- interference -----------------------------------------------------------------------------------------------------------------


async def window(
    server: Server | Peer, args: argparse.Namespace, draw: random.Random, *, prompts: bool
) -> dict[str, float]:
    """Figures of one window: gaps between tokens of the streams in ms, and TTFT of the prompts in s."""
    async with Client(server.url) as client:
        streams: list[list[float]] = [[] for _ in range(args.streams)]
        tasks = [asyncio.create_task(follow(client, body_of(args, ids(draw, 60), 6000), t)) for t in streams]
        while not all(len(t) > 3 for t in streams):
            await asyncio.sleep(0.05)
            for task in tasks:
                if task.done():
                    task.result()
        began_s, ttft_s, out = time.perf_counter(), [], {}
        while time.perf_counter() - began_s < args.seconds:
            if not prompts:
                await asyncio.sleep(0.2)
                continue
            sent_s = time.perf_counter()
            first: list[float] = []
            one = asyncio.create_task(follow(client, body_of(args, ids(draw, args.prompt), 4), first))
            await asyncio.wait([one], timeout=max(began_s + 3 * args.seconds - sent_s, 1))
            if not one.done():
                one.cancel()
                break
            if first:
                ttft_s.append(first[0] - sent_s)
        end_s = time.perf_counter()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    inside = [[t for t in times if began_s <= t <= end_s] for times in streams]
    gaps = [b - a for times in inside for a, b in pairwise(times)]
    out = {
        "p50_ms": percentile(gaps, 0.5) * 1e3,
        "p99_ms": percentile(gaps, 0.99) * 1e3,
        "max_ms": max(gaps) * 1e3,
        "tokens_per_s": sum(map(len, inside)) / (end_s - began_s),
        "load_1m": os.getloadavg()[0],
    }
    if ttft_s:
        out |= {"ttft_s": median(ttft_s), "n_prompts": len(ttft_s)}
    return out


def interference(args: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(args.seed)
    kinds = {"apart": ("--prefill", "1", "--decode", "1"), "unified": ("--workers", "1")}
    names = [*kinds, *(["peer"] if args.peer else [])]
    arms = [(name, prompts) for name in names for prompts in (False, True)]
    rounds: dict[str, list[dict[str, float]]] = {}
    with serving(args, **kinds) as own:
        servers: dict[str, Server | Peer] = {**own, **({"peer": Peer(args.peer)} if args.peer else {})}
        for server in servers.values():  # rates are measured before they count
            asyncio.run(window(server, args, draw, prompts=True))
        for k in range(args.rounds):
            for kind, prompts in arms[k % len(arms) :] + arms[: k % len(arms)]:
                name = f"{kind}{', prompts' if prompts else ', idle'}"
                rounds.setdefault(name, []).append(
                    asyncio.run(window(servers[kind], args, draw, prompts=prompts))
                )
                print(name, {k: round(v, 2) for k, v in rounds[name][-1].items()}, flush=True)
        hand_overs = own["apart"].metric("kilat_hand_overs_total")
    fields = ("p50_ms", "p99_ms", "max_ms", "tokens_per_s", "ttft_s", "n_prompts", "load_1m")
    rows = {
        n: {f: spread([r[f] for r in rs if f in r]) for f in fields if f in rs[0]} for n, rs in rounds.items()
    }
    lines = [[n, *(_text(row.get(f)) for f in fields)] for n, row in sorted(rows.items())]
    print_table(f"{args.streams} streams, prompts of {args.prompt} tokens", ["arm", *fields], lines)
    ratios = {}
    for kind in names:
        pairs = zip(rounds[f"{kind}, prompts"], rounds[f"{kind}, idle"])
        ratios[kind] = spread([loaded["p99_ms"] / idle["p99_ms"] for loaded, idle in pairs])
        print(f"{kind}: p99 beside prompts / idle {_text(ratios[kind])}")
    return {"rows": rows, "p99_ratios": ratios, "rounds": rounds, "hand_overs": hand_overs}


# -- hand-over --------------------------------------------------------------------------------------------------------------------


async def one_prompt(server: Server, args: argparse.Namespace, prompt: list[int]) -> dict[str, float]:
    async with Client(server.url) as client:
        times: list[float] = []
        sent_s = time.perf_counter()
        await follow(client, body_of(args, prompt, 12), times)
    gaps = [b - a for a, b in pairwise(times)]
    return {"ttft_s": times[0] - sent_s, "second_token_ms": gaps[0] * 1e3, "later_ms": median(gaps[1:]) * 1e3}


def hand_over(args: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(args.seed + 1)
    kinds = {"apart": ("--prefill", "1", "--decode", "1"), "plain": ("--workers", "2")}
    rounds: dict[str, list[dict[str, float]]] = {"apart": [], "plain": []}
    with serving(args, **kinds) as servers:
        page_bytes = POOL_BYTES // servers["apart"].workers()["decode-0"]["n_pages"]
        for server in servers.values():
            asyncio.run(one_prompt(server, args, ids(draw, args.prompt)))
        moved = servers["apart"].metric("kilat_moved_bytes_total")
        for k in range(args.rounds):
            prompt = ids(draw, args.prompt)
            for kind in ("apart", "plain") if k % 2 else ("plain", "apart"):
                rounds[kind].append(asyncio.run(one_prompt(servers[kind], args, prompt)))
                print(kind, {k: round(v, 3) for k, v in rounds[kind][-1].items()}, flush=True)
        moved = servers["apart"].metric("kilat_moved_bytes_total") - moved
        told = [w["prefill_tokens_per_s"] for w in servers["apart"].workers().values()]
        failed = servers["apart"].metric("kilat_moves_failed_total")
    fields = ("ttft_s", "second_token_ms", "later_ms")
    rows = {n: {f: spread([r[f] for r in rs]) for f in fields} for n, rs in rounds.items()}
    needed = args.rounds * -(-args.prompt // PAGE_TOKENS) * page_bytes
    ratios = [a["ttft_s"] / b["ttft_s"] for a, b in zip(rounds["apart"], rounds["plain"])]
    print_table(
        f"one prompt of {args.prompt} tokens",
        ["arm", *fields],
        [[n, *map(_text, row.values())] for n, row in rows.items()],
    )
    print(
        f"TTFT apart / plain {_text(spread(ratios))}; moved {moved / needed:.3f} of the pages' bytes, {failed:g} moves failed"
    )
    seen = args.prompt / rows["apart"]["ttft_s"]["median"]
    print(f"rate of prompts: {max(told):.0f} tokens/s by the worker's counters, {seen:.0f} by the client")
    return {
        "rows": rows,
        "prompt_tokens_per_s": {"told": max(told), "seen": seen},
        "ttft_ratio": spread(ratios),
        "moved_bytes": moved,
        "needed_bytes": needed,
        "moves_failed": failed,
    }


# -- shared prefix ----------------------------------------------------------------------------------------------------------------


async def prefix_round(server: Server, args: argparse.Namespace, draw: random.Random) -> list[dict[str, Any]]:
    """Requests under one new prefix, each sent when the one before has its first token, until every worker had one."""
    system = ids(draw, args.system)
    out: list[dict[str, Any]] = []
    tasks: list[asyncio.Task[None]] = []
    async with httpx.AsyncClient(base_url=server.url, timeout=300, trust_env=False) as http:
        for k in range(args.requests):
            body = {**body_of(args, system + ids(draw, 20), 48), "stream": True}
            first: asyncio.Future[tuple[str, float]] = asyncio.get_running_loop().create_future()
            sent_s = time.perf_counter()
            tasks.append(asyncio.create_task(_stream(http, body, first)))
            request_id, at_s = await first
            told = (await http.get(f"/v1/cache/explain/{request_id}")).json()
            out.append({"k": k, "ttft_s": at_s - sent_s, "told": told["prompts"][0]})
        await asyncio.gather(*tasks)
    return out


async def _stream(
    http: httpx.AsyncClient, body: dict[str, Any], first: "asyncio.Future[tuple[str, float]]"
) -> None:
    async with http.stream("POST", "/v1/completions", json=body) as r:
        async for line in r.aiter_lines():
            if not first.done() and line.startswith("data: {"):
                first.set_result((r.headers["x-request-id"], time.perf_counter()))


def prefix(args: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(args.seed + 2)
    misses, hits, locals_, fetched = [], [], [], []
    with serving(args, four=("--workers", "4")) as servers:
        server = servers["four"]
        for k in range(args.rounds + 1):
            answers = asyncio.run(prefix_round(server, args, draw))
            seen: set[str] = set()
            for a in answers:
                told = a["told"]
                worker, cached = told["routes"][-1]["worker"], told["cached_tokens"] or 0
                kind = "miss" if a["k"] == 0 else "further" if worker not in seen else "same"
                print(k, kind, worker, round(a["ttft_s"], 3), cached, flush=True)
                if k and kind == "miss":
                    misses.append(a["ttft_s"])
                elif k and kind == "further":
                    hits.append(a["ttft_s"])
                    fetched.append(cached)
                elif k:
                    locals_.append(a["ttft_s"])
                seen.add(worker)
        lends = server.metric("kilat_prefix_lends_total")
    rows = {n: spread(v) for n, v in (("miss", misses), ("further", hits), ("same", locals_)) if v}
    lines = [
        [n, str(len(v)), _text(rows[n])]
        for n, v in (("miss", misses), ("further", hits), ("same", locals_))
        if v
    ]
    print_table(f"system prompt of {args.system} tokens, 4 workers", ["request", "n", "ttft_s"], lines)
    return {"rows": rows, "cached_tokens_of_further": fetched, "lends": lends}


# -- planned moves ----------------------------------------------------------------------------------------------------------------


async def drained(server: Server, args: argparse.Namespace, draw: random.Random) -> list[float]:
    """The longest pause of each stream that moved around a drain, in median steps after it."""
    async with Client(server.url) as client:
        streams: list[list[float]] = [[] for _ in range(8)]
        tasks = [asyncio.create_task(follow(client, body_of(args, ids(draw, 200), 400), t)) for t in streams]
        while not all(len(t) > 20 for t in streams):
            await asyncio.sleep(0.02)
            for task in tasks:
                if task.done():
                    task.result()  # it has failed, or was too short
        # making a client takes 40 ms, in which this process hears no stream
        async with httpx.AsyncClient(base_url=server.url, timeout=120, trust_env=False) as http:
            await http.get("/cluster/workers")
            await asyncio.sleep(1.0)  # the prompts of the last ones made the others wait
            before_s = time.perf_counter()
            told = await http.post("/cluster/workers/worker-0/drain", json={"restart": True})
            assert told.status_code == 200, told.text
            after_s = time.perf_counter()
        await asyncio.gather(*tasks)
    pauses = []
    for times in streams:
        step_s = median(b - a for a, b in pairwise(times) if a > after_s)
        pauses.append(max(b - a for a, b in pairwise(times) if b > before_s and a < after_s) / step_s)
    # Which ones moved is not told; they are taken to be those with the longest pauses.
    return sorted(pauses, reverse=True)[: told.json()["moved_sessions"]]


def moves(args: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(args.seed + 3)
    longest: list[float] = []
    with serving(args, two=("--workers", "2")) as servers:
        server = servers["two"]
        for _ in range(args.rounds):
            pauses = asyncio.run(drained(server, args, draw))
            longest += pauses
            print("pauses in steps", [round(p, 2) for p in pauses], flush=True)
            while any(w["state"] != "ready" for w in server.workers().values()) or len(server.workers()) < 2:
                time.sleep(0.2)
        moved = server.metric("kilat_planned_moves_total")
    print(
        f"longest pause: median {median(longest):.2f}, p90 {percentile(longest, 0.9):.2f}, max {max(longest):.2f} steps"
    )
    return {"pause_steps": longest, "planned_moves": moved}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return (
        f"{value['median']:.3g} ({value['min']:.3g}-{value['max']:.3g})"
        if isinstance(value, dict)
        else f"{value}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a window")
    parser.add_argument("--peer", default="", help="URL of another server of this model, for interference")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--system", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=10, help="under one system prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    args = parser.parse_args()
    args.kind, args.name = "cluster", fetch(args.model).name
    made: dict[str, Any] = {}
    runs = {"interference": interference, "hand_over": hand_over, "prefix": prefix, "moves": moves}
    for section in args.only.split(","):
        made[section] = runs[section](args)
    if args.json:
        shapes = {k: getattr(args, k) for k in ("streams", "prompt", "system", "seconds", "rounds")}
        subject = Subject(args.name, "cpu", None, None, None)
        write_json(Path(args.json), envelope(args, subject, shapes=shapes, results=made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
