"""Row-plans per second of the scheduler alone: ``plan`` and ``commit`` of decode steps, no model.

    python bench/bench_scheduler.py [--rows 32 64 128 256] [--steps 1000] [--repeat 5] [--json FILE]

Every session decodes in every step and fills a page each ``page_tokens`` steps, so page allocation and hashing are included. Prefill
of the prompts and the first steps are not timed. A row-plan is one row through one ``plan`` and its ``commit``. Prints a table; with
--json writes the same as JSON (commit, machine, shapes, seed; best and median of the repeats, in seconds and rows per second).
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import time
from pathlib import Path

from kilat.policy.sched.config import SchedulerConfig
from kilat.policy.sched.plan import StepPlan, StepResult
from kilat.policy.sched.scheduler import Scheduler
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SessionRecord

GOAL_ROWS_PER_S = 20_000
PAGE_TOKENS, PROMPT_TOKENS, WARM_STEPS = 16, 128, 20
VOCAB = 32_000


def result_of(plan: StepPlan, ids: list[list[int]]) -> StepResult:
    """What a runner would give: one token per sampling row."""
    return StepResult([ids[i] if row.sample else [] for i, row in enumerate(plan.rows)])


def run(n_rows: int, n_steps: int, depth: int, seed: int) -> tuple[float, float]:
    """(seconds in ``plan``, seconds in ``commit``) of ``n_steps`` decode steps of ``n_rows`` sessions."""
    rng = random.Random(seed)
    length = PROMPT_TOKENS + WARM_STEPS + n_steps + 2
    config = SchedulerConfig(
        n_pages=n_rows * (length // PAGE_TOKENS + 2),
        page_tokens=PAGE_TOKENS,
        max_model_len=length + PAGE_TOKENS,
        max_num_seqs=n_rows,
        max_step_tokens=n_rows * PROMPT_TOKENS,
        depth=depth,
    )
    scheduler = Scheduler(config, model_id="bench", eos_ids=[0])
    for i in range(n_rows):
        prompt = [rng.randrange(1, VOCAB) for _ in range(PROMPT_TOKENS)]
        scheduler.submit(SessionRecord(f"ses-{i:04}", prompt, SamplingParams(seed=i, ignore_eos=True)), 0.0)
    outputs = [[[rng.randrange(1, VOCAB)] for _ in range(n_rows)] for _ in range(64)]
    waiting: list[StepPlan] = []
    plan_s = commit_s = 0.0
    n_timed = 0
    for step in range(WARM_STEPS + n_steps):
        begin = time.perf_counter()
        plan = scheduler.plan(step * 0.01)
        planned = time.perf_counter()
        assert plan is not None
        waiting.append(plan)
        if len(waiting) < depth:
            continue
        oldest = waiting.pop(0)
        result = result_of(oldest, outputs[step % 64])
        ready = time.perf_counter()
        events = scheduler.commit(oldest, result, step * 0.01 + 0.005)
        committed = time.perf_counter()
        assert len(events) == n_rows and len(plan.rows) == n_rows
        if step >= WARM_STEPS:
            plan_s += planned - begin
            commit_s += committed - ready
            n_timed += 1
    assert n_timed == n_steps
    return plan_s, commit_s


def measure(n_rows: int, n_steps: int, depth: int, seed: int, repeat: int) -> dict[str, object]:
    """Best and median of ``repeat`` runs."""
    times = [run(n_rows, n_steps, depth, seed) for _ in range(repeat)]
    best = min(times, key=sum)
    n = n_rows * n_steps
    return {
        "rows": n_rows,
        "depth": depth,
        "steps": n_steps,
        "rows_per_s": n / sum(best),
        "rows_per_s_median": n / statistics.median(map(sum, times)),
        "plan_us_per_row": best[0] / n * 1e6,
        "commit_us_per_row": best[1] / n * 1e6,
        "step_ms": sum(best) / n_steps * 1e3,
    }


def machine() -> dict[str, str]:
    """Where this ran."""
    root = Path(__file__).resolve().parent.parent
    sha = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=30)
    names = [
        x.split(":")[1].strip()
        for x in Path("/proc/cpuinfo").read_text().splitlines()
        if x.startswith("model name")
    ]
    return {
        "sha": sha.stdout.strip(),
        "device": names[0] if names else platform.machine(),
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--depth", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    print(
        f"{'rows':>5} {'depth':>5} {'row-plans/s':>12} {'median':>9} {'plan us':>8} {'commit us':>9} {'step ms':>8}"
    )
    for n_rows in args.rows:
        for depth in args.depth:
            r = measure(n_rows, args.steps, depth, args.seed, args.repeat)
            results.append(r)
            print(
                f"{n_rows:>5} {depth:>5} {r['rows_per_s']:>12,.0f} {r['rows_per_s_median']:>9,.0f}"
                f" {r['plan_us_per_row']:>8.2f} {r['commit_us_per_row']:>9.2f} {r['step_ms']:>8.3f}"
            )
    print(f"goal: {GOAL_ROWS_PER_S:,} row-plans/s")
    if args.json:
        out = {
            "benchmark": "scheduler",
            **machine(),
            "seed": args.seed,
            "page_tokens": PAGE_TOKENS,
            "results": results,
        }
        args.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
