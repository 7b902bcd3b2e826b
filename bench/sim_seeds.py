"""Many runs of the simulated cluster: every request must end once and with its tokens, no page may stay pinned, whatever goes wrong.

    python -m bench.sim_seeds [--seeds 10000] [--first 0] [--edges 10] [--json FILE]

``--seeds``: runs with traffic, fleet and faults drawn from the seed. ``--edges``: for so many seeds more, one run for each edge of each
worker of the calm run, where that worker ends there, and one where it stands still. Prints what was broken, with the seed that shows it
again, and exits 1. Time is measured, for the goal of 10,000 seeds in 5 minutes on one core.
"""

import argparse
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from kilat.cli.report import Subject, envelope, print_table, write_json
from kilat.sim.faults import Fault, Faults, Weather
from tests.sim.mover import virtual_time
from tests.sim.runs import START_S, cluster, settle

GOAL_S = 300.0
GOAL_SEEDS = 10_000
FREEZES_S = (None, 0.2, 3.0)


class Tally:
    """What happened in all runs, and what was broken in which."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.broken: list[tuple[str, str]] = []

    def run(self, seed: int, faults: Faults | None = None, name: str = "") -> None:
        """One run; an exception out of the objects themselves is broken too."""
        self.counts["runs"] += 1
        try:
            c, at_s = cluster(seed, faults)
            broken = settle(c, at_s)
        except Exception:
            broken = [traceback.format_exc(limit=-3)]
        else:
            self.counts["requests"] += len(c.requests)
            self.counts["cancelled"] += len(c.cancelled)
            self.counts["workers lost"] += c.n_restarts
            self.counts["changes of shares"] += len(c.control.changes)
            self.counts["samples whole"] += sum(end.error is None for _, end in c.control.ends())
            self.counts["samples failed"] += sum(end.error is not None for _, end in c.control.ends())
            for key, n in c.control.dispatcher.counts.items():
                self.counts[key.removeprefix("kilat_").removesuffix("_total")] += n
        self.broken += [(name or f"seed {seed}", what) for what in broken]

    def run_edges(self, seed: int) -> None:
        """A fault at each edge of each worker."""
        c, at_s = cluster(seed, Faults())
        with virtual_time(c.agenda):
            c.agenda.run(max(at_s, START_S) + 0.5)
        for name, worker in c.workers.items():
            for edge in range(worker.edges):
                for freeze_s in FREEZES_S:
                    what = f"seed {seed}, {name} at edge {edge}, freeze {freeze_s}"
                    self.run(seed, Faults(Weather(), {f"{name}.0": Fault(edge, freeze_s)}), what)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=GOAL_SEEDS)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--edges", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.kind, args.seed = "sim_seeds", args.first
    tally = Tally()
    begin = time.process_time()
    for seed in range(args.first, args.first + args.seeds):
        tally.run(seed)
    seeds_s = time.process_time() - begin
    for seed in range(args.first, args.first + args.edges):
        tally.run_edges(seed)
    edges_s = time.process_time() - begin - seeds_s
    title = (
        f"{args.seeds:,} seeds: {seeds_s:.1f} s of one core; every edge of {args.edges} runs: {edges_s:.1f} s"
    )
    print_table(title, ["what", "n"], [[k, f"{v:,}"] for k, v in tally.counts.items()])
    for name, what in tally.broken[:50]:
        print(f"{name}: {what}", file=sys.stderr)
    subject = Subject("none (simulated)", None, None, 1, None)
    document = envelope(
        args,
        subject,
        seeds=args.seeds,
        edge_seeds=args.edges,
        seeds_s=seeds_s,
        edges_s=edges_s,
        goal_s=GOAL_S * args.seeds / GOAL_SEEDS,
        counts=dict(tally.counts),
        broken=tally.broken,
    )
    write_json(args.json, document)
    return 1 if tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())
