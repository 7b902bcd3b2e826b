"""One stream on the CPU: the native runtime beside the engine at batch 1, in one interleaved run.

    python bench/bench_native.py [--model smollm2] [--weights stored wide] [--lengths 128 1024 4096] [--tokens 2000] [--rounds 3]
                                 [--program kilat-native] [--peer llama_gaps] [--starts 10] [--json FILE] [--svg FILE]

Each round does, for the runtime and then for the engine with the same weights: time to first token (TTFT) of a random prompt of each
length, and the gaps between ``tokens`` / ``rounds`` greedy tokens after a prompt of 64. Of the gaps of all rounds: tokens/s (from the
mean), p50, p99, p99.9, max. ``wait`` is the time in which a core was wanted by more than it had, from /proc/pressure/cpu, as a share of
the wall time: above some percent a figure says more about the machine's other work. ``start`` is from the start of a process to the
first byte of its first token on its stdout, file in the page cache, median and largest of ``starts``: ``kilat-native`` as a program,
``kilat native``, and Python with the engine. ``--peer`` is bench/llama_gaps.cpp, for models that are a GGUF file.
"""

import argparse
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import native_histogram

from kilat.base.ids import new_session_id
from kilat.cli.fetch import fetch
from kilat.cli.measures import percentile
from kilat.cli.report import Subject, envelope, print_table, write_json
from kilat.engine.config import EngineConfig
from kilat.llm import LLM
from kilat.native.runtime import NativeModel, NativeSession, Sampling
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SessionRecord

PROMPT_TOKENS = 64
GREEDY = Sampling()
START_ENGINE = (
    "import sys\nfrom kilat.llm import LLM\nfrom kilat.wire.sampling import SamplingParams\n"
    "with LLM(sys.argv[1], max_num_seqs=1, max_model_len=4096) as llm:\n"
    "    done = llm.generate(['Hello'], SamplingParams(temperature=0.0, max_tokens=1))\n"
    "    print(done[0].samples[0].text, flush=True)\n"
)


@dataclass
class Times:
    """What one contender did, in milliseconds."""

    ttft: dict[int, list[float]] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    wait_share: list[float] = field(default_factory=list)


def pressure_s() -> float:
    """Seconds in which some task waited for a core, since boot; 0 where the system does not tell."""
    path = Path("/proc/pressure/cpu")
    if not path.exists():
        return 0.0
    return int(path.read_text().split("total=")[1].split()[0]) * 1e-6


class Native:
    """The runtime: one call a step."""

    def __init__(self, path: Path, weights: str, context: int, threads: int) -> None:
        self.model = NativeModel(path, weights=weights, threads=threads)
        self.session: NativeSession = self.model.session(context)

    def first_ms(self, prompt: list[int]) -> float:
        self.session.rewind(0)
        begin = time.perf_counter()
        self.session.prefill(prompt, GREEDY)
        return (time.perf_counter() - begin) * 1e3

    def gaps_ms(self, prompt: list[int], n: int) -> list[float]:
        session = self.session
        session.rewind(0)
        token = session.prefill(prompt, GREEDY)
        out, before = [], time.perf_counter()
        for _ in range(n):
            assert token is not None
            token = session.step(token, GREEDY)
            now = time.perf_counter()
            out.append((now - before) * 1e3)
            before = now
        return out


class EngineAlone:
    """The engine with one session, stepped from here: no server, no sockets."""

    def __init__(self, name: str, weights: str, context: int, threads: int) -> None:
        quant = "auto" if weights == "stored" else "none"
        options: dict[str, Any] = {"quant": quant} if hasattr(EngineConfig, "quant") else {}
        self.llm = LLM(
            name,
            max_num_seqs=1,
            max_model_len=context,
            threads=threads,
            kernels="cpu",
            prefix_cache=False,
            **options,
        )

    def _submit(self, prompt: list[int], n: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, seed=0)
        self.llm.engine.submit(SessionRecord(new_session_id(), prompt, params))

    def first_ms(self, prompt: list[int]) -> float:
        begin = time.perf_counter()
        self._submit(prompt, 1)
        while self.llm.engine.has_work:
            self.llm.engine.step()
        return (time.perf_counter() - begin) * 1e3

    def gaps_ms(self, prompt: list[int], n: int) -> list[float]:
        self._submit(prompt, n + 1)
        stamps = []
        while self.llm.engine.has_work:
            events = self.llm.engine.step()
            stamps += [time.perf_counter()] * sum(len(e.token_ids) for e in events)
        return [(b - a) * 1e3 for a, b in itertools.pairwise(stamps)]


class Peer:
    """llama.cpp through bench/llama_gaps.cpp, a process a call; the time to load is left out."""

    def __init__(self, program: str, path: Path, context: int, threads: int) -> None:
        self._command = [program, str(path), str(threads), str(context)]

    def _times(self, prompt: list[int], n: int) -> list[float]:
        command = [*self._command, str(n), *map(str, prompt)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        return [float(line) for line in done.stdout.split()]

    def first_ms(self, prompt: list[int]) -> float:
        return self._times(prompt, 0)[0]

    def gaps_ms(self, prompt: list[int], n: int) -> list[float]:
        return self._times(prompt, n)[1:]


Contender = Native | EngineAlone | Peer


def one_round(name: str, who: Contender, times: Times, args: argparse.Namespace, seed: int) -> None:
    rng = random.Random(seed)
    begin, waited = time.perf_counter(), pressure_s()
    for n in args.lengths:
        times.ttft.setdefault(n, []).append(who.first_ms([rng.randrange(10, 10000) for _ in range(n)]))
    prompt = [rng.randrange(10, 10000) for _ in range(PROMPT_TOKENS)]
    times.gaps += who.gaps_ms(prompt, args.tokens // args.rounds)
    times.wait_share.append((pressure_s() - waited) / (time.perf_counter() - begin))
    print(f"{name}: {len(times.gaps)} gaps, last wait {100 * times.wait_share[-1]:.0f} %", file=sys.stderr)


def start_ms(command: list[str]) -> float:
    """From the start of a process to the first byte on its stdout."""
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1)
        took = (time.perf_counter() - begin) * 1e3
        process.communicate(timeout=120)
    if process.returncode or not first:
        raise RuntimeError(f"{command[:3]} wrote nothing and ended with {process.returncode}")
    return took


def measure_starts(args: argparse.Namespace, path: Path) -> dict[str, dict[str, float]]:
    python = [sys.executable, "-c"]
    main = "import sys; from kilat.cli.main import main; raise SystemExit(main(sys.argv[1:]))"
    commands = {
        f"kilat-native {w}": [args.program, str(path), "-p", "Hello", "-n", "1", "--weights", w]
        for w in args.weights
    }
    commands["kilat native"] = [*python, main, "native", str(path), "-p", "Hello", "--max-tokens", "1"]
    commands["engine in Python"] = [*python, START_ENGINE, str(path)]
    out = {}
    for name, command in commands.items():
        n = args.starts if name != "engine in Python" else min(args.starts, 3)
        times = sorted(start_ms(command) for _ in range(n))
        out[name] = {"median": round(percentile(times, 50), 1), "max": round(times[-1], 1), "starts": n}
    return out


def summary(times: Times) -> dict[str, Any]:
    gaps = sorted(times.gaps)
    return {
        "decode_tokens_per_s": round(1e3 * len(gaps) / sum(gaps), 2),
        "gap_ms": {
            "p50": round(percentile(gaps, 50), 3),
            "p99": round(percentile(gaps, 99), 3),
            "p99.9": round(percentile(gaps, 99.9), 3),
            "max": round(gaps[-1], 3),
        },
        "gaps": len(gaps),
        "ttft_ms": {str(n): round(min(values), 2) for n, values in times.ttft.items()},
        "ttft_ms_all": {str(n): [round(v, 2) for v in values] for n, values in times.ttft.items()},
        "wait_percent": [round(100 * w, 1) for w in times.wait_share],
    }


def measure(args: argparse.Namespace) -> dict[str, Times]:
    path = fetch(args.model).path
    context = max([*args.lengths, PROMPT_TOKENS + args.tokens // args.rounds]) + 8
    makers: dict[str, Callable[[], Contender]] = {}
    for w in args.weights:
        makers[f"native {w}"] = partial(Native, path, w, context, args.threads)
        makers[f"engine {w}"] = partial(EngineAlone, args.model, w, context, args.threads)
    if args.peer:
        makers["llama.cpp"] = partial(Peer, args.peer, path, context, args.threads)
    contenders = {name: make() for name, make in makers.items()}
    times = {name: Times() for name in contenders}
    for who in contenders.values():
        who.gaps_ms([1, 2, 3], 5)
    for r in range(args.rounds):
        for name, who in contenders.items():
            one_round(name, who, times[name], args, args.seed + r)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", nargs="+", choices=("stored", "wide"), default=["stored", "wide"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 1024, 4096])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument(
        "--program", help="kilat-native, for the time from a process's start to its first token"
    )
    parser.add_argument("--starts", type=int, default=10, help="processes to start with --program")
    parser.add_argument("--peer", help="bench/llama_gaps.cpp, built")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    args.kind = "native"
    times = measure(args)
    results = {name: summary(t) for name, t in times.items()}
    lines = [
        [
            name,
            f"{r['decode_tokens_per_s']:.1f}",
            *(f"{r['gap_ms'][p]:.2f}" for p in ("p50", "p99", "p99.9", "max")),
            *(f"{v:.1f}" for v in r["ttft_ms"].values()),
            f"{max(r['wait_percent']):.0f}",
        ]
        for name, r in results.items()
    ]
    columns = ("", "tok/s", "p50 ms", "p99", "p99.9", "max", *(f"TTFT {n}" for n in args.lengths))
    shown = Path(args.model).name
    print_table(f"{shown}, one stream", (*columns, "wait %"), lines, n_text=1)
    starts = measure_starts(args, fetch(args.model).path) if args.program else {}
    for name, s in starts.items():
        print(f"start to first token, {name}: median {s['median']:.0f} ms, max {s['max']:.0f} ms")
    if args.svg:
        title = f"{shown}, one stream: gaps between {args.tokens} tokens"
        args.svg.write_text(
            native_histogram.svg(title, {n: t.gaps for n, t in times.items()}), encoding="utf-8"
        )
    if args.json:
        subject = Subject(shown, "cpu", "bfloat16", args.threads, "native kernels")
        shapes = {
            "lengths": args.lengths,
            "tokens": args.tokens,
            "rounds": args.rounds,
            "prompt_tokens": PROMPT_TOKENS,
        }
        write_json(args.json, envelope(args, subject, shapes=shapes, results={**results, "start_ms": starts}))


if __name__ == "__main__":
    main()
