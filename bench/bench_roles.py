"""Traffic that turns from long prompts to long answers and back: shares that follow it, against every split that stays.

    python -m bench.bench_roles [--workers 4] [--phase 40] [--cycles 2] [--load 1.0] [--seeds 0 1 2] [--tpot-slo 40 25] [--json FILE]
    python -m bench.bench_roles --trace TRACE.jsonl.gz --load 1.5 --ttft-slo 3000 --prompt-us 30 [--begin 0] [--seconds 300]

The simulated cluster with the real dispatcher, router, schedulers and role scaler; only model and wires are not (``kilat.sim``). Two kinds
of phases take turns: prompt-heavy (3,000 tokens in, 20 out) and decode-heavy (300 in, 300 out); arrivals are Poisson, the same for all
rows. With --trace it is a part of one of Mooncake's (its prefix hits are left out), --load times as fast. A request is good when its
TTFT and its mean time per output token are within their targets. Goodput is good requests per second.

Rows: every static split of prefill and decode workers, all workers doing both (chunks of prompts beside decode, the step bounded by
the TPOT target), and the scaler, which begins with half of the workers on each side. With several seeds a number is the mean, and the worst
seed stands behind it.
"""

import argparse
import gzip
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kilat.cli.report import Subject, envelope, print_table, write_json
from kilat.policy.route.config import RouterConfig
from kilat.policy.scale.config import ScaleConfig
from kilat.policy.scale.roles import RoleScaler
from kilat.policy.sched.config import SchedulerConfig
from kilat.sim.cluster import Cluster, Weights
from kilat.sim.faults import Faults
from kilat.sim.model import StepCost
from kilat.sim.worker import WorkerShape
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SessionRecord
from tests.sim.gateway import Gateway, Stream
from tests.sim.mover import make_mover, virtual_time

START_S = 1.0
BASE_S, ROW_S = 0.010, 0.0002
WINDOW_S = 1.0
ROUNDED_S = 3.0
PAGE_TOKENS = 64
BESIDE = 0.9
"""Part of the TPOT target that steps with a chunk of a prompt keep to."""


@dataclass(frozen=True)
class Phase:
    """``rate``: requests per second and worker."""

    name: str
    rate: float
    n_prompt: int
    n_output: int


PHASES = (Phase("prompt-heavy", 2.0, 3000, 20), Phase("decode-heavy", 5.0, 300, 300))


@dataclass(frozen=True)
class Arrival:
    at_s: float
    phase: str
    n_prompt: int
    n_output: int


@dataclass(frozen=True)
class Targets:
    """In seconds."""

    ttft_s: float
    tpot_s: float

    def good(self, stream: Stream) -> bool:
        return (stream.ttft_s or 0.0) <= self.ttft_s and (stream.tpot_s or 0.0) <= self.tpot_s


def made(args: argparse.Namespace, seed: int) -> list[Arrival]:
    rng = random.Random(seed)
    arrivals, begin_s = [], START_S
    for phase in PHASES * args.cycles:
        rate = phase.rate * args.workers * args.load
        at_s = begin_s + rng.expovariate(rate)
        while at_s < begin_s + args.phase:
            n_prompt, n_output = (
                max(int(n * rng.uniform(0.7, 1.3)), 1) for n in (phase.n_prompt, phase.n_output)
            )
            arrivals.append(Arrival(at_s, phase.name, n_prompt, n_output))
            at_s += rng.expovariate(rate)
        begin_s += args.phase
    return arrivals


def replayed(args: argparse.Namespace, seed: int) -> list[Arrival]:
    """Its times are rounded to ``ROUNDED_S``: requests of one time are spread over what it stands for."""
    rng = random.Random(seed)
    arrivals = []
    with gzip.open(args.trace, "rt") as lines:
        for line in lines:
            r = json.loads(line)
            at_s = START_S + (r["timestamp"] / 1e3 - args.begin + rng.uniform(0.0, ROUNDED_S)) / args.load
            if START_S <= at_s < START_S + args.seconds:
                arrivals.append(Arrival(at_s, "trace", max(r["input_length"], 1), max(r["output_length"], 1)))
    return sorted(arrivals, key=lambda a: a.at_s)


def shape(targets: Targets, prompt_s: float) -> WorkerShape:
    config = SchedulerConfig(
        n_pages=8000,
        page_tokens=PAGE_TOKENS,
        max_model_len=250_000,
        max_num_seqs=128,
        max_step_tokens=2048,
        max_waiting=10_000,
        prefix_cache=False,
        target_step_s=BESIDE * targets.tpot_s,
    )
    return WorkerShape(config, StepCost(BASE_S, prompt_s, ROW_S), page_move_s=0.0008, content=False)


def run(setup: "Setup", arrivals: list[Arrival], targets: Targets, prompt_s: float) -> dict[str, Any]:
    follows = setup.follows
    router = RouterConfig(
        dead_after_s=60.0,
        move_s=0.001,
        page_move_s=0.0008,
        target_step_s=BESIDE * targets.tpot_s if follows else None,
    )
    scaler = RoleScaler(ScaleConfig(targets.ttft_s, targets.tpot_s)) if follows else None
    control = Gateway(router=router, scaler=scaler, window_s=WINDOW_S)
    cluster = Cluster(
        control, shape(targets, prompt_s), setup.weights, Faults(), random.Random(0), make_mover
    )
    for i, a in enumerate(arrivals):
        params = SamplingParams(seed=0, max_tokens=a.n_output, ignore_eos=True)
        cluster.request(a.at_s, SessionRecord(f"ses-{i}", [i % 97] * a.n_prompt, params))
    begin = time.process_time()
    with virtual_time(cluster.agenda):
        cluster.agenda.run(arrivals[-1].at_s, max_calls=50_000_000)
        while control.leftovers() and cluster.agenda.now_s < arrivals[-1].at_s + 1000.0:
            cluster.agenda.run(cluster.agenda.now_s + 10.0, max_calls=50_000_000)
    assert not cluster.refused and not control.leftovers(), (cluster.refused, control.leftovers())
    streams = [control.readers[f"ses-{i}"].streams[0] for i in range(len(arrivals))]
    assert all(s.error is None for s in streams)
    row: dict[str, Any] = {"seconds": time.process_time() - begin, "changes": len(control.changes)}
    for phase in dict.fromkeys(a.phase for a in arrivals):
        of_phase = [s for s, a in zip(streams, arrivals) if a.phase == phase]
        row[phase] = {
            "good": sum(map(targets.good, of_phase)) / len(of_phase),
            "ttft_p90_s": quantile([s.ttft_s or 0.0 for s in of_phase], 0.9),
            "tpot_p90_s": quantile([s.tpot_s or 0.0 for s in of_phase], 0.9),
        }
    n_good = sum(map(targets.good, streams))
    row["good"] = n_good / len(streams)
    row["goodput_per_s"] = n_good / (arrivals[-1].at_s - START_S)
    return row


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]


@dataclass(frozen=True)
class Setup:
    """``follows``: shares and router go by the targets."""

    name: str
    weights: dict[str, Weights]
    follows: bool = False


def setups(n: int) -> list[Setup]:
    def split(n_prefill: int) -> dict[str, Weights]:
        return {f"w{i}": (1.0, 0.0) if i < n_prefill else (0.0, 1.0) for i in range(n)}

    return [
        *(Setup(f"{p} prefill + {n - p} decode", split(p)) for p in range(1, n)),
        Setup(f"{n} do both", {f"w{i}": (1.0, 1.0) for i in range(n)}),
        Setup("shares that follow", split(n // 2), follows=True),
    ]


def measure(args: argparse.Namespace, tpot_s: float) -> list[dict[str, Any]]:
    """All rows with one target, each over all seeds."""
    targets = Targets(args.ttft_slo / 1e3, tpot_s)
    traffics = [(replayed if args.trace else made)(args, seed) for seed in args.seeds]
    rows = []
    for setup in setups(args.workers):
        runs = [run(setup, arrivals, targets, args.prompt_us / 1e6) for arrivals in traffics]
        rows.append({"setup": setup.name, "tpot_slo_s": tpot_s, "ttft_slo_s": targets.ttft_s, "runs": runs})
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    phases = list(dict.fromkeys(a.phase for a in traffics[0]))
    columns = ["setup", "goodput/s", "good (worst)", "changes"]
    for phase in phases:
        columns += [f"{phase}: good", "TTFT p90 s", "TPOT p90 ms"]
    lines = [
        [
            r["setup"],
            f"{mean(r['runs'], 'goodput_per_s'):.2f}",
            f"{mean(r['runs'], 'good'):.1%} ({min(x['good'] for x in r['runs']):.1%})",
            f"{mean(r['runs'], 'changes'):.0f}",
            *(
                text
                for of_phase in ([x[phase] for x in r["runs"]] for phase in phases)
                for text in (
                    f"{mean(of_phase, 'good'):.1%}",
                    f"{mean(of_phase, 'ttft_p90_s'):.2f}",
                    f"{mean(of_phase, 'tpot_p90_s') * 1e3:.1f}",
                )
            ),
        ]
        for r in rows
    ]
    title = (
        f"{args.trace.name if args.trace else 'made traffic'}, load {args.load}: {len(traffics[0]):,} requests, "
        f"{args.workers} workers; targets: TTFT {args.ttft_slo:.0f} ms, TPOT {tpot_s * 1e3:.0f} ms"
    )
    print_table(title, columns, lines)
    return rows


def mean(rows: list[dict[str, Any]], name: str) -> float:
    return sum(r[name] for r in rows) / len(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--phase", type=float, default=40.0, help="seconds of one phase")
    parser.add_argument("--cycles", type=int, default=2)
    parser.add_argument("--load", type=float, default=1.0, help="times as many requests per second")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--begin", type=float, default=0.0, help="second of the trace")
    parser.add_argument("--seconds", type=float, default=300.0, help="of a trace, as fast as it is replayed")
    parser.add_argument("--ttft-slo", type=float, default=1500.0, help="ms")
    parser.add_argument("--tpot-slo", type=float, nargs="+", default=[40.0, 25.0], help="ms")
    parser.add_argument("--prompt-us", type=float, default=100.0, help="time of a token of a prompt")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.kind, args.seed = "roles", args.seeds[0]
    rows = [row for tpot_ms in args.tpot_slo for row in measure(args, tpot_ms / 1e3)]
    shapes = {
        "workers": args.workers,
        "phase_s": args.phase,
        "cycles": args.cycles,
        "load": args.load,
        "trace": args.trace.name if args.trace else None,
        "trace_begin_s": args.begin,
        "phases": [[p.name, p.rate * args.workers * args.load, p.n_prompt, p.n_output] for p in PHASES],
        "step_cost_s": [BASE_S, args.prompt_us / 1e6, ROW_S],
    }
    write_json(
        args.json, envelope(args, Subject("none (simulated)", None, None, 1, None), shapes=shapes, rows=rows)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
