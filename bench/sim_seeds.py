"""Many runs of the simulated cluster: every request must end once and with its tokens, no page may stay pinned, whatever goes wrong.

    python -m bench.sim_seeds [--seeds 10000] [--first 0] [--edges 10] [--jobs N] [--json FILE]

``--seeds``: runs with traffic, fleet and faults drawn from the seed. ``--edges``: for so many seeds more, one run for each edge of each
worker of the calm run, where that worker ends there, and one where it stands still. ``--jobs``: processes, by default one for each core.
Prints what was broken, with the seed that shows it again, and exits 1. Time is measured, for the goal of 10,000 seeds in 5 minutes on
one core. ``make test`` runs it.
"""

import argparse
import multiprocessing
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from types import FrameType

from kilat.cli.machine import read_machine
from kilat.cli.progress import RowBar
from kilat.cli.report import Subject, envelope, print_table, write_json
from kilat.sim.faults import Fault, Faults, Weather
from tests.sim.mover import virtual_time
from tests.sim.runs import START_S, cluster, settle

GOAL_S = 300.0
GOAL_SEEDS = 10_000
BLOCK = 50
RUN_LIMIT_S = 60
FREEZES_S = (None, 0.2, 3.0)
N_SHOWN = 50


class Tally:
    """What happened in all runs, what was broken in which, and the time of one core that each kind took."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.broken: list[tuple[str, str]] = []
        self.seeds_s = self.edges_s = 0.0

    def run(self, seed: int, faults: Faults | None = None, name: str = "") -> None:
        """One run; an exception out of the objects themselves, or no end in ``RUN_LIMIT_S``, is broken too."""
        self.counts["runs"] += 1
        signal.alarm(RUN_LIMIT_S)
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
        finally:
            signal.alarm(0)
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

    def add(self, other: "Tally") -> None:
        self.counts.update(other.counts)
        self.broken += other.broken
        self.seeds_s += other.seeds_s
        self.edges_s += other.edges_s


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"no end after {RUN_LIMIT_S} s")


def run_block(seeds: range, edges: bool) -> Tally:
    """The runs of some seeds, or one for each of their edges; what one process does at a time."""
    tally = Tally()
    signal.signal(signal.SIGALRM, _too_long)
    begin = time.process_time()
    for seed in seeds:
        if edges:
            tally.run_edges(seed)
        else:
            tally.run(seed)
    seconds = time.process_time() - begin
    tally.edges_s, tally.seeds_s = (seconds, 0.0) if edges else (0.0, seconds)
    return tally


def blocks(first: int, n_seeds: int, n_edges: int) -> Iterator[tuple[range, bool]]:
    """Arguments of :func:`run_block`: the long ones first, so that no process is alone at the end."""
    yield from ((range(seed, seed + 1), True) for seed in range(first, first + n_edges))
    end = first + n_seeds
    yield from ((range(begin, min(begin + BLOCK, end)), False) for begin in range(first, end, BLOCK))


def run_all(args: argparse.Namespace) -> Tally:
    """All runs, in ``args.jobs`` processes."""
    tally = Tally()
    with (
        RowBar("simulated clusters", args.seeds + args.edges) as bar,
        ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool,
    ):
        waiting = {
            pool.submit(run_block, *block): len(block[0])
            for block in blocks(args.first, args.seeds, args.edges)
        }
        for done in as_completed(waiting):
            tally.add(done.result())
            bar.advance(waiting[done])
    tally.broken.sort()
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=GOAL_SEEDS)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--edges", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=read_machine().cores)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.kind, args.seed = "sim_seeds", args.first
    begin = time.monotonic()
    tally = run_all(args)
    wall_s = time.monotonic() - begin
    title = (
        f"{args.seeds:,} seeds: {tally.seeds_s:.1f} s of one core; every edge of {args.edges} runs: {tally.edges_s:.1f} s; "
        f"in {args.jobs} processes: {wall_s:.1f} s; broken: {len(tally.broken)}"
    )
    print_table(title, ["what", "n"], [[k, f"{v:,}"] for k, v in tally.counts.items()])
    for name, what in tally.broken[:N_SHOWN]:
        print(f"{name}: {what}", file=sys.stderr)
    subject = Subject("none (simulated)", None, None, args.jobs, None)
    document = envelope(
        args,
        subject,
        seeds=args.seeds,
        edge_seeds=args.edges,
        seeds_s=tally.seeds_s,
        edges_s=tally.edges_s,
        wall_s=wall_s,
        goal_s=GOAL_S * args.seeds / GOAL_SEEDS,
        counts=dict(tally.counts),
        broken=tally.broken,
    )
    write_json(args.json, document)
    return 1 if tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())
