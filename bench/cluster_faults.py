"""Harm to workers at each moment of a request's life, many times; nothing may be wrong, lost, doubled or left over.

    python -m bench.cluster_faults [--trials 100] [--real-trials 10] [--seed 1] [--json FILE]

Run from the root of the repository: machinery and moments are those of tests/cluster (fault_worker.py, fault_run.py). Two prefill and two
decode workers are real processes; at the moment that a trial names, the worker that meets it kills itself (SIGKILL), stops (SIGSTOP), or
loses its connections to the gateway or to its peers. Each trial has one marked request and three others, of one or three samples, greedy or
seeded; what they say is compared with one plain worker. ``fake``: the real scheduler, gateway and transports around tokens that are read back
from the pages; ``real``: an engine around a tiny random model. ``full disk``: SIGKILL again, of workers with a small pool and a disk cache
on a file system that is full soon (left out where none may be mounted). At last Ray is killed, with all that it has started, while streams
of workers that it has placed run, and is started again after ``--ray-gone-s`` seconds (0: left out, as where Ray is not installed).
"""

import argparse
import dataclasses
import importlib.util
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kilat.cli.machine import read_machine, source_sha
from kilat.cli.report import print_table, write_json
from tests.cluster import fault_run
from tests.cluster.fault_run import MOMENTS, Outcome, Trials
from tests.cluster.ray_gone import ray_gone
from tests.cluster.small_disk import NoSmallDisk, small_disk
from tests.cluster.tiny_model import write_tiny_model
from tests.policy.sched.fakes import VOCAB

REAL_VOCAB = 256
DISK_KIB = 512
HARM = ("kill", "stop", "link", "pages", "full disk", "ray")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trials", type=int, default=100, help="of each moment, with the fake engine and SIGKILL"
    )
    parser.add_argument("--real-trials", type=int, default=10)
    parser.add_argument(
        "--other-trials", type=int, default=20, help="of each moment, with SIGSTOP and lost connections"
    )
    parser.add_argument("--ray-gone-s", type=float, default=60.0)
    parser.add_argument("--only", default=",".join(HARM), help="kinds of harm")
    parser.add_argument("--moments", default=",".join(MOMENTS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    moments, only = args.moments.split(","), args.only.split(",")
    plans = [
        ("fake", "kill", args.trials, moments),
        ("fake", "stop", args.other_trials, moments),
        ("fake", "link", args.other_trials, moments),
        ("fake", "pages", args.other_trials, ["reading"]),
        ("fake", "full disk", args.other_trials, moments),
        ("real", "kill", args.real_trials, moments),
    ]
    rows: list[dict[str, Any]] = []
    for engine, how, n, which in plans:
        if n and how in only:
            rows += [
                {"engine": engine, **dataclasses.asdict(o)} for o in measure(engine, how, n, which, args.seed)
            ]
    if "ray" in only and args.ray_gone_s and importlib.util.find_spec("ray") is not None:
        with tempfile.TemporaryDirectory() as name:
            rows.append({"engine": "fake", **dataclasses.asdict(ray_gone(Path(name), args.ray_gone_s))})
    if not rows:
        return 0
    columns = [c for c in rows[0] if c != "notes"]
    print_table("harm to workers", columns, [[_cell(row[c]) for c in columns] for row in rows], n_text=3)
    for row in rows:
        for note in row["notes"]:
            print(f"{row['engine']} {row['how']} {row['moment']}: {note}")
    if args.json:
        machine = read_machine()
        document = {
            "bench": "cluster_faults",
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "sha": source_sha(),
            "machine": {"cpu": machine.cpu, "cores": machine.cores, "load_1m": round(os.getloadavg()[0], 1)},
            "seed": args.seed,
            "shapes": {
                "workers": fault_run.WORKERS,
                "requests_per_trial": 4,
                "output_tokens": fault_run.N_OUT,
            },
            "results": rows,
        }
        write_json(args.json, document)
    return int(any(row["wrong"] or row["failed"] or row["leaks"] for row in rows))


def _cell(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def measure(engine: str, how: str, n: int, moments: list[str], seed: int) -> list[Outcome]:
    real = engine == "real"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tiny").mkdir()
        model = write_tiny_model(folder / "tiny").path
        options: dict[str, Any] = {"transports": ["tcp"]} if how == "pages" else {}
        disk = ExitStack()
        if how == "full disk":
            try:
                cache = disk.enter_context(small_disk(folder / "disk", DISK_KIB))
            except NoSmallDisk as e:
                print(f"left out: no file system for a full disk can be mounted here: {e}")
                return []
            options = {"disk_cache_gb": 0.01, "disk_cache_dir": str(cache), "fake": fault_run.TIERED}
        oracle = fault_run.plain(folder / "plain", model, real=real)
        server = fault_run.start(folder / "many", model, real=real, **options)
        trials = Trials(server, oracle, vocab=REAL_VOCAB if real else VOCAB, seed=seed)
        out = []
        try:
            for moment in moments:
                began_s = time.monotonic()
                out.append(trials.run("kill" if how == "full disk" else how, moment, n))
                out[-1].how = how
                words = "good" if out[-1].is_good else f"BAD: {out[-1].notes}"
                print(
                    f"{engine} {how} {moment}: {out[-1].hits} of {n} hits, {words}, {time.monotonic() - began_s:.0f} s",
                    flush=True,
                )
        finally:
            trials.close()
            if how == "full disk":
                print(f"full disk: {server.log().count('is off from now on: No space')} disk caches gave up")
            for one in (server, oracle):
                one.stop()
            disk.close()
        return out


if __name__ == "__main__":
    sys.exit(main())
