"""Host time of a decode step outside the model: what a step costs beside its forward pass.

    python bench/bench_step.py [--model smollm2] [--rows 1 8 32 64] [--steps 100] [--json FILE]

The real engine decodes ``rows`` sessions, greedy and sampled. Of each step the engine's own counters give

    scheduler  step - run: plan and commit
    run        run - model: input tensors, sampler, bookkeeping
    host       both; the goal is 1 ms at 32 rows, greedy

Beside them, on the rows and logits of the last step: ``inputs`` (build_batch alone), ``sampler`` (Sampler.sample alone) and ``frame``
(the step's events as one message, which the worker adds). Medians over the steps, with the tenth percentile beside host: on a busy
machine a step may lose the core, and the lower figure is what the code costs. Milliseconds.
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kilat.base import metrics
from kilat.cli.fetch import fetch
from kilat.cli.measures import percentile
from kilat.cli.report import Subject, envelope, print_table, write_json
from kilat.engine.inputs import build_batch
from kilat.llm import LLM
from kilat.wire import codec
from kilat.wire.messages import SessionEvent, StepEvents
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SessionRecord

GOAL_MS, GOAL_ROWS = 1.0, 32
WARM_STEPS = 10
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, top_k=50),
}


class Seen:
    """Stands before a sampler and keeps the arguments of its last call."""

    def __init__(self, sampler: Any) -> None:
        self.sample = sampler.sample
        sampler.sample = self

    def __call__(self, rows: Any, logits: torch.Tensor) -> Any:
        self.rows, self.logits = rows, logits
        return self.sample(rows, logits)


def times_ms(engine: Any, n_steps: int) -> tuple[list[tuple[float, float, float]], list[SessionEvent]]:
    """(scheduler, run without model, model) of each step, and the events of the last."""
    out, events = [], []
    for _ in range(n_steps):
        before = engine.counters()
        events = engine.step()
        after = engine.counters()
        step, run, model = (
            (after[name] - before[name]) * 1e3
            for name in (metrics.STEP_SECONDS, metrics.RUN_SECONDS, metrics.MODEL_SECONDS)
        )
        out.append((step - run, run - model, model))
    return out, events


def alone_ms(call: Callable[[], object], repeat: int) -> float:
    """Median milliseconds of ``call``."""
    took = []
    for _ in range(repeat):
        begin = time.perf_counter()
        call()
        took.append((time.perf_counter() - begin) * 1e3)
    return percentile(took, 50)


def measure(llm: LLM, name: str, n_rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """One line of the table."""
    engine = llm.engine
    rng = random.Random(args.seed)
    p = SAMPLINGS[name]
    n_tokens = WARM_STEPS + args.steps + 10
    ids = [f"ses-{i:04}" for i in range(n_rows)]
    for i, session_id in enumerate(ids):
        params = SamplingParams(
            temperature=p.temperature,
            top_p=p.top_p,
            top_k=p.top_k,
            seed=args.seed + i,
            max_tokens=n_tokens,
            ignore_eos=True,
        )
        prompt = [rng.randrange(engine.info.vocab_size) for _ in range(args.input_len)]
        engine.submit(SessionRecord(session_id, prompt, params))
    while len(engine.step()) < n_rows:  # prompts, in one or several chunks
        pass
    times_ms(engine, WARM_STEPS)
    seen = Seen(engine.runner.sampler)
    steps, events = times_ms(engine, args.steps)
    assert len(events) == n_rows, f"{len(events)} events of {n_rows} rows"
    page_tokens, device = engine.info.page_tokens, torch.device("cpu")
    with torch.inference_mode():
        inputs = alone_ms(lambda: build_batch(seen.rows, page_tokens, device), args.steps)
        sampler = alone_ms(lambda: seen.sample(seen.rows, seen.logits), args.steps)
    frame = alone_ms(lambda: codec.encode(StepEvents(engine.step_count, events)), args.steps)
    engine.runner.sampler.sample = seen.sample
    engine.abort(ids)
    engine.step()
    host = [scheduler + run for scheduler, run, _ in steps]
    return {
        "sampling": name,
        "rows": n_rows,
        "host_ms": percentile(host, 50),
        "host_p10_ms": percentile(host, 10),
        "scheduler_ms": percentile([s[0] for s in steps], 50),
        "run_ms": percentile([s[1] for s in steps], 50),
        "inputs_ms": inputs,
        "sampler_ms": sampler,
        "frame_ms": frame,
        "model_ms": percentile([s[2] for s in steps], 50),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--sampling", nargs="+", choices=SAMPLINGS, default=list(SAMPLINGS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--input-len", type=int, default=100)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.kind = "step"
    fetch(args.model)
    length = args.input_len + WARM_STEPS + args.steps + 16
    with LLM(args.model, max_num_seqs=max(args.rows), max_model_len=length, threads=args.threads) as llm:
        info = llm.engine.info
        results = [measure(llm, name, n, args) for name in args.sampling for n in args.rows]
        subject = Subject(args.model, "cpu", info.dtype, args.threads, info.kernels)
    columns = [c.removesuffix("_ms") for c in results[0]]
    lines = [[f"{x:.3f}" if isinstance(x, float) else str(x) for x in r.values()] for r in results]
    print_table(f"host milliseconds of a decode step, {args.model}, {info.kernels}", columns, lines)
    print(f"goal: host <= {GOAL_MS:g} ms at {GOAL_ROWS} rows, greedy")
    shapes = {"input_tokens": args.input_len, "steps": args.steps, "vocab": info.vocab_size}
    write_json(args.json, envelope(args, subject, shapes=shapes, results=results))


if __name__ == "__main__":
    main()
