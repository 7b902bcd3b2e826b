"""Traffic that turns from long prompts to long answers and back: shares that follow it, against every split that stays.

    python -m bench.bench_roles [--workers 4] [--phase 40] [--cycles 2] [--tpot-slo 0.04 0.025] [--json FILE]

The simulated cluster with the real dispatcher, router, schedulers and role scaler; only model and wires are not (``kilat.sim``). Two kinds
of phases take turns: prompt-heavy (3,000 tokens in, 20 out) and decode-heavy (300 in, 300 out); arrivals are Poisson, the same for all
rows. A request is good when its TTFT and its mean time per output token are within their targets. Goodput is good requests per second.

Rows: every static split of prefill and decode workers, all workers doing both (chunks of prompts beside decode, the step bounded by
the TPOT target), and the scaler, which begins with half of the workers on each side.
"""

import argparse
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
COST = StepCost(base_s=0.010, prompt_token_s=0.0001, row_s=0.0002)
TTFT_SLO_S = 1.5
WINDOW_S = 1.0
PAGE_TOKENS = 64


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
    phase: Phase
    n_prompt: int
    n_output: int


def traffic(n_workers: int, phase_s: float, cycles: int, seed: int) -> list[Arrival]:
    rng = random.Random(seed)
    arrivals, begin_s = [], START_S
    for phase in PHASES * cycles:
        at_s = begin_s + rng.expovariate(phase.rate * n_workers)
        while at_s < begin_s + phase_s:
            n_prompt, n_output = (
                max(int(n * rng.uniform(0.7, 1.3)), 1) for n in (phase.n_prompt, phase.n_output)
            )
            arrivals.append(Arrival(at_s, phase, n_prompt, n_output))
            at_s += rng.expovariate(phase.rate * n_workers)
        begin_s += phase_s
    return arrivals


def shape(tpot_slo_s: float) -> WorkerShape:
    config = SchedulerConfig(
        n_pages=4000,
        page_tokens=PAGE_TOKENS,
        max_model_len=8192,
        max_num_seqs=128,
        max_step_tokens=2048,
        max_waiting=10_000,
        prefix_cache=False,
        target_step_s=0.9 * tpot_slo_s,
    )
    return WorkerShape(config, COST, page_move_s=0.0008, content=False)


def run(
    weights: dict[str, Weights], arrivals: list[Arrival], tpot_slo_s: float, scaler: RoleScaler | None
) -> dict[str, Any]:
    router = RouterConfig(dead_after_s=60.0, move_s=0.001, page_move_s=0.0008)
    control = Gateway(router=router, scaler=scaler, window_s=WINDOW_S)
    cluster = Cluster(control, shape(tpot_slo_s), weights, Faults(), random.Random(0), make_mover)
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
    for phase in PHASES:
        of_phase = [s for s, a in zip(streams, arrivals) if a.phase is phase]
        row[phase.name] = {
            "good": n_good(of_phase, tpot_slo_s) / len(of_phase),
            "ttft_p90_s": quantile([s.ttft_s or 0.0 for s in of_phase], 0.9),
            "tpot_p90_s": quantile([s.tpot_s or 0.0 for s in of_phase], 0.9),
        }
    row["good"] = n_good(streams, tpot_slo_s) / len(streams)
    row["goodput_per_s"] = n_good(streams, tpot_slo_s) / (arrivals[-1].at_s - START_S)
    return row


def n_good(streams: list[Stream], tpot_slo_s: float) -> int:
    return sum((s.ttft_s or 0.0) <= TTFT_SLO_S and (s.tpot_s or 0.0) <= tpot_slo_s for s in streams)


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]


def split(n_prefill: int, n_workers: int) -> dict[str, Weights]:
    return {f"w{i}": (1.0, 0.0) if i < n_prefill else (0.0, 1.0) for i in range(n_workers)}


def measure(arrivals: list[Arrival], tpot_slo_s: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows with one target."""
    n = args.workers
    setups: list[tuple[str, dict[str, Weights], RoleScaler | None]] = [
        (f"{p} prefill + {n - p} decode", split(p, n), None) for p in range(1, n)
    ]
    setups.append((f"{n} do both", {f"w{i}": (1.0, 1.0) for i in range(n)}, None))
    scale = ScaleConfig(TTFT_SLO_S, tpot_slo_s)
    setups.append(("shares that follow", split(n // 2, n), RoleScaler(scale)))
    rows = []
    for name, weights, scaler in setups:
        rows.append({"setup": name, "tpot_slo_s": tpot_slo_s, **run(weights, arrivals, tpot_slo_s, scaler)})
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    columns = ["setup", "goodput/s", "good", "changes"]
    for phase in PHASES:
        columns += [f"{phase.name}: good", "TTFT p90 s", "TPOT p90 ms"]
    lines = [
        [r["setup"], f"{r['goodput_per_s']:.2f}", f"{r['good']:.1%}", str(r["changes"])]
        + [
            text
            for phase in PHASES
            for text in (
                f"{r[phase.name]['good']:.1%}",
                f"{r[phase.name]['ttft_p90_s']:.2f}",
                f"{r[phase.name]['tpot_p90_s'] * 1e3:.1f}",
            )
        ]
        for r in rows
    ]
    title = (
        f"{len(arrivals):,} requests in {2 * args.cycles} phases of {args.phase:.0f} s, {n} workers; "
        f"targets: TTFT {TTFT_SLO_S} s, TPOT {tpot_slo_s * 1e3:.0f} ms"
    )
    print_table(title, columns, lines)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--phase", type=float, default=40.0, help="seconds of one phase")
    parser.add_argument("--cycles", type=int, default=2)
    parser.add_argument("--tpot-slo", type=float, nargs="+", default=[0.04, 0.025])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.kind = "roles"
    arrivals = traffic(args.workers, args.phase, args.cycles, args.seed)
    rows = [row for tpot_slo_s in args.tpot_slo for row in measure(arrivals, tpot_slo_s, args)]
    shapes = {
        "workers": args.workers,
        "phase_s": args.phase,
        "cycles": args.cycles,
        "phases": [[p.name, p.rate * args.workers, p.n_prompt, p.n_output] for p in PHASES],
        "step_cost_s": [COST.base_s, COST.prompt_token_s, COST.row_s],
        "ttft_slo_s": TTFT_SLO_S,
    }
    write_json(
        args.json, envelope(args, Subject("none (simulated)", None, None, 1, None), shapes=shapes, rows=rows)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
