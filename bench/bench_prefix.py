"""Time to the first token of a chat with a long system prompt: when it is new (miss) and when it is in the prefix cache (hit).

    python bench/bench_prefix.py [--model smollm2] [--words 2000] [--repeat 7] [--disk-gb GB] [--json FILE]

Over HTTP, as people see it: `kilat serve` in a child process, streamed chat completions, one at a time. Each round has a system prompt
of its own and three questions of one length: ``miss`` brings the system prompt for the first time, ``hit`` asks something else under
it, ``bare`` asks without it (what a hit cannot be faster than). Rounds are interleaved, figures are medians (min-max); the goal is a
hit within a fifth of a miss.

With ``--disk-gb`` the pool is so small that other prompts (not in the table) push the system prompt out of it, and two more questions
under it follow: ``disk`` finds its pages in the file of the disk cache as the system has cached it, ``cold`` after the system was told to
forget the file. Both compute what is not in full pages, as a hit does.

Checked, or the run fails: ``usage`` of each answer names exactly the full pages that its prompt shares with an earlier one, and the
server's counters of tokens looked up and found equal the sums over all answers since its start.
"""

import argparse
import asyncio
import os
import random
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from kilat.cli.client import Client
from kilat.cli.fetch import fetch
from kilat.cli.measures import spread
from kilat.cli.report import Subject, envelope, print_table, write_json
from kilat.cli.server import ChildServer
from kilat.cli.workload import WORDS

GOAL = 1 / 5
KINDS = ("miss", "hit", "bare")
DISK_KINDS = ("disk", "cold")
COUNTER_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Answer:
    """What one stream amounts to; ``ids`` is its prompt."""

    kind: str
    ids: list[int]
    ttft_ms: float
    cached_tokens: int


def words(draw: random.Random, n: int) -> str:
    return " ".join(draw.choices(WORDS, k=n))


def shared_pages(earlier: list[int], ids: list[int], page_tokens: int) -> int:
    """Tokens of the full pages that the prompt ``ids`` can take from an earlier one: its last token is always computed."""
    n = 0
    while n < min(len(earlier), len(ids) - 1) and earlier[n] == ids[n]:
        n += 1
    return n // page_tokens * page_tokens


async def ask(client: Client, url: str, body: dict[str, Any], kind: str) -> Answer:
    """Stream one answer."""
    asked = {"messages": body["messages"]}
    ids = httpx.post(f"{url}/tokenize", json=asked, timeout=30, trust_env=False).json()["tokens"]
    sent_s = time.perf_counter()
    first_s = usage = None
    async for chunk in client.stream("/v1/chat/completions", body):
        if first_s is None and chunk.text:
            first_s = chunk.at_s
        usage = chunk.usage or usage
    assert first_s is not None and usage is not None, "the stream had no text or no usage"
    assert usage.prompt_tokens == len(ids), f"usage says {usage.prompt_tokens} tokens, /tokenize {len(ids)}"
    return Answer(kind, ids, (first_s - sent_s) * 1e3, usage.cached_tokens)


async def run(url: str, model: str, args: argparse.Namespace) -> list[Answer]:
    """All answers in order, those of a warm-up round first."""
    draw = random.Random(args.seed)
    out = []
    async with Client(url) as client:
        for index in range(args.repeat + 1):
            system = {"role": "system", "content": f"{index} {words(draw, args.words)}"}
            for kind in kinds_of(args):
                if kind in DISK_KINDS:
                    out += await push_out(client, url, model, draw, args)
                    await settle(url, Path(args.disk_dir), cold=kind == "cold")
                question = {"role": "user", "content": words(draw, 12)}
                body = {
                    "model": model,
                    "messages": [question] if kind == "bare" else [system, question],
                    "temperature": 0,
                    "max_tokens": args.output_len,
                    "ignore_eos": True,
                }
                out.append(await ask(client, url, body, kind))
    return out


async def push_out(
    client: Client, url: str, model: str, draw: random.Random, args: argparse.Namespace
) -> list[Answer]:
    """Fill the pool with other prompts."""
    out = []
    for _ in range(2):
        other = [{"role": "user", "content": words(draw, args.words * 9 // 5)}]
        body = {"model": model, "messages": other, "temperature": 0, "max_tokens": 1, "ignore_eos": True}
        out.append(await ask(client, url, body, "other"))
    return out


async def settle(url: str, folder: Path, *, cold: bool) -> None:
    """Wait until no more pages are written to the disk cache; ``cold``: then let the system forget its file."""
    written, now = -1.0, metric(url, "kilat_tier_disk_written_bytes_total")
    while written != now:
        await asyncio.sleep(1.5)  # the worker tells its counters twice a second
        written, now = now, metric(url, "kilat_tier_disk_written_bytes_total")
    for path in folder.glob("*/pages") if cold else ():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def kinds_of(args: argparse.Namespace) -> tuple[str, ...]:
    return KINDS + (DISK_KINDS if args.disk_gb else ())


def check(url: str, answers: list[Answer], page_tokens: int) -> None:
    """Raise AssertionError when ``usage`` or the server's counters are wrong."""
    for i, answer in enumerate(answers):
        expected = max((shared_pages(a.ids, answer.ids, page_tokens) for a in answers[:i]), default=0)
        got = answer.cached_tokens
        assert got == expected, f"answer {i} ({answer.kind}) reports {got} cached tokens, not {expected}"
    asked = {
        "kilat_prefix_queried_tokens_total": sum(len(a.ids) for a in answers),
        "kilat_prefix_hit_tokens_total": sum(a.cached_tokens for a in answers),
    }
    deadline = time.monotonic() + COUNTER_TIMEOUT_S
    while (counted := {name: metric(url, name) for name in asked}) != asked:
        assert time.monotonic() < deadline, f"the server counts {counted}, its answers say {asked}"
        time.sleep(0.1)  # the worker tells its counters twice a second


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    return float(found.group(1)) if found else 0.0


def report(args: argparse.Namespace, answers: list[Answer]) -> float:
    """Print the table and write the JSON; returns hit / miss."""
    results = []
    for kind in kinds_of(args):
        of = [a for a in answers if a.kind == kind]
        results.append(
            {
                "kind": kind,
                "prompt_tokens": median(len(a.ids) for a in of),
                "cached_tokens": median(a.cached_tokens for a in of),
                "ttft_ms": spread([a.ttft_ms for a in of]),
            }
        )
    ratio = results[1]["ttft_ms"]["median"] / results[0]["ttft_ms"]["median"]
    lines = []
    for r in results:
        t = r["ttft_ms"]
        cells = [f"{t['median']:.1f}", f"{t['min']:.1f}", f"{t['max']:.1f}"]
        lines.append([r["kind"], f"{r['prompt_tokens']:g}", f"{r['cached_tokens']:g}", *cells])
    columns = ("", "prompt tokens", "cached", "TTFT ms", "min", "max")
    print_table(f"prefix cache of {args.model}: {args.repeat} rounds", columns, lines)
    print(f"hit / miss {ratio:.3f}, goal {GOAL:g}; usage and counters agree")
    for r in results[len(KINDS) :]:
        print(f"{r['kind']} / miss {r['ttft_ms']['median'] / results[0]['ttft_ms']['median']:.3f}")
    shapes = {"system_words": args.words, "rounds": args.repeat, "page_tokens": args.page_tokens}
    shapes["disk_gb"] = args.disk_gb
    subject = Subject(args.model, "cpu", None, None, None)
    fields = {"shapes": shapes, "results": results, "hit_over_miss": ratio, "load_1m": os.getloadavg()[0]}
    write_json(args.json, envelope(args, subject, **fields))
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--words", type=int, default=2000)
    parser.add_argument("--output-len", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--page-tokens", type=int, default=16)
    parser.add_argument("--disk-gb", type=float, default=0.0)
    parser.add_argument("--pool", default="95MB", help="memory for pages with --disk-gb (default 95MB)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.kind = "prefix"
    files = fetch(args.model)
    command = [sys.executable, "-m", "kilat.cli", "serve", args.model, "--port", "0", "--stop-at-stdin-end"]
    command += ["--drain-timeout", "0", "--block-size", str(args.page_tokens)]
    folder = tempfile.TemporaryDirectory()
    args.disk_dir = folder.name
    if args.disk_gb:
        command += ["--disk-cache-gb", str(args.disk_gb), "--disk-cache-dir", folder.name]
        command += ["--kv-cache-memory-bytes", args.pool, "--max-model-len", "4096"]
    server = ChildServer(command)
    try:
        url = server.wait_ready(120)
        answers = asyncio.run(run(url, files.name, args))
        check(url, answers, args.page_tokens)
    finally:
        server.stop()
        folder.cleanup()
    n_warm = len(answers) // (args.repeat + 1)
    return 0 if report(args, answers[n_warm:]) <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
