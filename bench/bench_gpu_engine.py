"""The engine on one CUDA device with random weights: decode steps by rows, time to first token, offline throughput, interference.

    python bench/bench_gpu_engine.py bench/shapes/llama31-8b [--cases decode,ttft] [--out FILE.json]

Everything runs through ``Engine.submit`` and ``Engine.step``, as a worker does it. Prints a table, writes JSON.
"""

import argparse
import gc
import json
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from statistics import median

import torch

from kilat.base import metrics
from kilat.engine.build import build_engine
from kilat.engine.config import EngineConfig
from kilat.engine.core import Engine
from kilat.engine.roofs import measure_roofs
from kilat.engine.utilisation import Roofs
from kilat.engine.watch import watch_steps
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SessionRecord


def submit(engine: Engine, name: str, n_prompt: int, n_output: int, **params) -> None:
    """A session with a prompt of its own (no prefix hits)."""
    generator = torch.Generator().manual_seed(hash(name) % (1 << 31))
    ids = torch.randint(10, engine.info.vocab_size - 10, (n_prompt,), generator=generator).tolist()
    p = SamplingParams(
        **{"temperature": 0.0, "max_tokens": n_output, "ignore_eos": True, "seed": 1, **params}
    )
    engine.submit(SessionRecord(name, ids, p))


def drain(engine: Engine) -> int:
    """Run to the end; returns output tokens."""
    n = 0
    while engine.has_work:
        n += sum(len(e.token_ids) for e in engine.step())
    return n


def decode_steps(engine: Engine, rows: int, context: int, n_steps: int) -> dict:
    """Median time between the news of consecutive steps in which exactly ``rows`` sessions decode at about ``context``."""
    names = [f"d{rows}-{i}-{time.time()}" for i in range(rows)]
    for name in names:
        submit(engine, name, context, 4000)
    speaking: set[str] = set()
    while len(speaking) < rows:
        speaking |= {e.session_id for e in engine.step()}
    for _ in range(8):
        engine.step()
    torch.cuda.synchronize()
    times = []
    before = time.perf_counter()
    while len(times) < n_steps:
        if engine.step():
            now = time.perf_counter()
            times.append(now - before)
            before = now
    engine.abort(names)
    drain(engine)
    times.sort()
    return {
        "rows": rows,
        "context": context,
        "step_ms": median(times) * 1e3,
        "p10_ms": times[len(times) // 10] * 1e3,
        "p90_ms": times[len(times) * 9 // 10] * 1e3,
    }


def device_use(engine: Engine, rows: int, context: int, roofs: Roofs) -> dict:
    """Decode steps under a profiler: the share of the time in which a kernel runs, what it waits for, the kernels that take most; and the
    bytes that a step must read over what a copy moves in the time of a step without a profiler."""
    names = [f"u{rows}-{i}-{time.time()}" for i in range(rows)]
    for name in names:
        submit(engine, name, context, 4000)
    speaking: set[str] = set()
    while len(speaking) < rows:
        speaking |= {e.session_id for e in engine.step()}
    watch = watch_steps(engine, lambda: 20 if engine.step_count >= begin else 0)
    # setting up the profiler took so long that the steps in flight have landed: the next ones seem to take no time
    begin = engine.step_count + 20
    while not watch.done:
        engine.step()
    use = watch.finish(roofs)
    engine.abort(names)
    drain(engine)
    return asdict(use)


def first_token(engine: Engine, n_prompt: int, repeats: int) -> dict:
    """Time from submit to the first token of one prompt on an idle engine."""
    times = []
    for k in range(repeats + 1):
        submit(engine, f"t{n_prompt}-{k}-{time.time()}", n_prompt, 1)
        begin = time.perf_counter()
        drain(engine)
        times.append(time.perf_counter() - begin)
    return {"prompt": n_prompt, "ttft_ms": median(times[1:]) * 1e3, "best_ms": min(times) * 1e3}


def offline(engine: Engine, n: int, n_prompt: int, n_output: int) -> dict:
    for i in range(n):
        submit(engine, f"o{i}-{time.time()}", n_prompt, n_output)
    begin = time.perf_counter()
    done = drain(engine)
    seconds = time.perf_counter() - begin
    return {
        "n": n,
        "prompt": n_prompt,
        "output": n_output,
        "s": seconds,
        "out_tps": done / seconds,
        "total_tps": (done + n * n_prompt) / seconds,
    }


def interference(engine: Engine, rows: int, n_prompt: int) -> dict:
    """Longest gap of any of ``rows`` streams when one long prompt arrives, and that prompt's time to first token."""
    for i in range(rows):
        submit(engine, f"i{i}-{time.time()}", 128, 400)
    speaking: set[str] = set()
    while len(speaking) < rows:
        speaking |= {e.session_id for e in engine.step()}
    for _ in range(20):
        engine.step()
    name = f"long-{time.time()}"
    submit(engine, name, n_prompt, 1)
    begin = before = time.perf_counter()
    gaps, ttft = [], None
    while ttft is None:
        events = engine.step()
        now = time.perf_counter()
        if any(e.session_id != name for e in events):
            gaps.append(now - before)
            before = now
        if any(e.session_id == name and e.token_ids for e in events):
            ttft = now - begin
    drain(engine)
    return {"rows": rows, "prompt": n_prompt, "longest_gap_ms": max(gaps) * 1e3, "ttft_ms": ttft * 1e3}


def arguments() -> argparse.Namespace:
    ap = argparse.ArgumentParser()
    ap.add_argument("shape")
    ap.add_argument("--deterministic", action="store_true")
    ap.add_argument("--quant", default="none", help="fp8: FP8 block weights")
    ap.add_argument("--kv-dtype", default="auto", help="fp8: pages in e4m3")
    ap.add_argument("--cases", default="decode,use,ttft,interference,offline")
    ap.add_argument("--step-tokens", type=int, default=8192)
    ap.add_argument(
        "--offline", default="256x1024x1024,2048x128x128", help="requests x prompt tokens x output tokens"
    )
    ap.add_argument("--rows", type=int, default=256, help="most sessions that run at once")
    ap.add_argument("--target-step-s", type=float, default=60.0, help="0.02 for the interference case")
    ap.add_argument(
        "--prepare-s", type=float, default=20.0, help="most seconds of preparing before the cases"
    )
    ap.add_argument("--sha", default="", help="of the code, where there is no git")
    ap.add_argument("--out", default="")
    return ap.parse_args()


def build(a: argparse.Namespace) -> Engine:
    return build_engine(
        EngineConfig(
            a.shape,
            "hf",
            "dummy",
            dummy_weights=True,
            max_model_len=16_384,
            max_num_seqs=a.rows,
            max_step_tokens=a.step_tokens,
            deterministic=a.deterministic,
            max_waiting=100_000,
            prefix_cache=False,
            quant=a.quant,
            kv_dtype=a.kv_dtype,
            target_step_s=a.target_step_s,
        )
    )


def start(a: argparse.Namespace) -> tuple[Engine, dict]:
    """An engine that has answered once and then prepared itself, and what that took."""
    begin = time.perf_counter()
    engine = build(a)
    built_s = time.perf_counter() - begin
    submit(engine, "first", 32, 2)
    while not engine.step():
        pass
    first_token_s = time.perf_counter() - begin
    gc.freeze()  # as in a worker
    drain(engine)
    compile_began, compiled_s, pauses = time.perf_counter(), 0.0, []
    while sum(pauses) < a.prepare_s:
        compiled = engine.runner.ahead.done
        begin = time.perf_counter()
        if engine.prepare():
            pauses.append(time.perf_counter() - begin)
        elif compiled:
            break
        else:
            time.sleep(0.05)
        if not compiled:
            compiled_s = time.perf_counter() - compile_began
    sha = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return engine, {
        "shape": a.shape,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "sha": a.sha or sha.stdout.strip(),
        "kernels": engine.info.kernels,
        "n_pages": engine.info.n_pages,
        "build_s": built_s,
        "first_token_s": first_token_s,
        "compiled_ahead_s": compiled_s,
        "prepared": {"n": len(pauses), "s": sum(pauses), "longest_ms": max(pauses, default=0.0) * 1e3},
    }


def main() -> None:
    a = arguments()
    engine, out = start(a)
    roofs = measure_roofs(torch.device("cuda"), torch.bfloat16, 1)
    out["roofs"] = asdict(roofs)
    print(json.dumps(out), flush=True)
    cases: dict[str, list[Callable[[], dict]]] = {
        "decode": [
            partial(decode_steps, engine, rows, 512, 100 if rows < 256 else 60) for rows in (1, 8, 64, 256)
        ],
        "use": [partial(device_use, engine, rows, 512, roofs) for rows in (1, 256)],
        "ttft": [partial(first_token, engine, n, 3) for n in (128, 1024, 8192)],
        "interference": [partial(interference, engine, 64, 8192)] * 3,
        "offline": [partial(offline, engine, *map(int, o.split("x"))) for o in a.offline.split(",")],
    }
    for name in a.cases.split(","):
        out[name] = []
        for case in cases[name]:
            out[name].append(case())
            print(name, out[name][-1], flush=True)
    out["host_s_per_step"] = engine.runner.run_s / max(engine.step_count, 1)
    out["counters"] = {
        k: v for k, v in engine.counters().items() if k in (metrics.STEPS, metrics.PREEMPTIONS)
    }
    out["graphs"] = {"n": len(engine.runner.graphs.captured), "bytes": engine.runner.graphs.n_bytes}
    print(json.dumps(out["graphs"]), out["host_s_per_step"], flush=True)
    if a.out:
        with open(a.out, "w") as f:
            json.dump(out, f, indent=1)
    engine.close()


if __name__ == "__main__":
    main()
