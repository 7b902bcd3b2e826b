"""Steps of one stream on one CUDA device with the native runtime and random weights: time per token, its tail, and where it goes.

    python bench/native_gpu.py [--models 1b 8b] [--formats bf16 fp8 q4_0] [--steps 2000] [--wait] [--library SO] [--out FILE.json]

A step is one call of the backend's ``forward`` from C: an id goes in, the id drawn comes out and is the next step's, which is begun before
the caller has the id (``--wait``: after). Times are between the moments at which the caller has the ids. Bytes are those of the weights that a step reads, without keys and values.
"""

import argparse
import ctypes as c
import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.native import cuda_table as table  # noqa: E402
from tests.native.cuda_models import Config, RandomModel, Session, greedy  # noqa: E402

MODELS = {
    "1b": {"layers": 16, "hidden": 2048, "inner": 8192, "q_heads": 32, "kv_heads": 8, "head_dim": 64},
    "8b": {"layers": 32, "hidden": 4096, "inner": 14336, "q_heads": 32, "kv_heads": 8, "head_dim": 128},
}
BITS = {"bf16": 16.0, "fp8": 8.125, "q4_0": 4.5}
PHASES = ("qkv", "attention", "out", "gate_up", "down")
# what the clocks of a layer lie between: inputs that are waited for, products
SPANS = (
    "qkv wait",
    "qkv",
    "attention",
    "out wait",
    "out",
    "gate_up wait",
    "gate_up",
    "down wait",
    "down",
)
PROMPT, WARM_UP = 64, 100


def matrix_bytes(config: Config, name: str) -> float:
    """Bytes that a step reads in all phases called ``name``."""
    heads = (config.q_heads + 2 * config.kv_heads) * config.head_dim
    sizes = {
        "qkv": heads * config.hidden,
        "attention": 0,
        "out": config.q_heads * config.head_dim * config.hidden,
        "gate_up": 2 * config.inner * config.hidden,
        "down": config.inner * config.hidden,
    }
    # a tied head is the embedding, which is bf16
    bits = 16.0 if name == "head" and config.tied else BITS[config.format]
    n = config.vocab * config.hidden if name == "head" else sizes[name] * config.layers
    return n * bits / 8


def percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def time_steps(session: Session, n: int, ahead: bool) -> list[float]:
    """Milliseconds between the ids of n steps after a prompt and a warm-up; ``ahead``: each is begun while the one before runs."""
    ids = [(i * 7919 + 13) % session.vocab for i in range(PROMPT)]
    first = session.forward(ids, 0, c.byref(greedy()))
    total = WARM_UP + n
    times = (c.c_double * total)()
    status = session.lib.kilat_time_steps(
        session.session,
        c.c_int32(first),
        c.c_int64(PROMPT),
        c.c_int64(1),
        c.c_int64(total),
        c.c_int(ahead),
        c.byref(greedy()),
        times,
        c.byref(session.failure),
    )
    if status:
        raise RuntimeError(session.failure.text.decode())
    return [1e3 * (b - a) for a, b in zip(times[WARM_UP - 1 : -1], times[WARM_UP:])]


Phases = dict[str, dict[str, float]]


def phases(session: Session, config: Config, position: int, step_ms: float) -> tuple[Phases, float]:
    """Time of each kind of phase in a step (block 0's clock, median of some steps) and the bandwidth that it comes to, as if the kernel
    took the whole step; and the GHz that the clock would then have."""
    n = config.layers * len(SPANS) + 4
    runs = []
    session.lib.kilat_cuda_trace(session.session, 1)
    for _ in range(9):
        session.forward([17], position, c.byref(greedy()))
        clocks = (c.c_longlong * n)()
        session.lib.kilat_cuda_trace_read(session.session, clocks, n)
        runs.append([b - a for a, b in itertools.pairwise(clocks)])
    session.lib.kilat_cuda_trace(session.session, 0)
    spans = [statistics.median(column) for column in zip(*runs)]
    to_us = step_ms * 1e3 / sum(spans)
    layered = spans[: config.layers * len(SPANS)]
    times = {name: sum(layered[i :: len(SPANS)]) * to_us for i, name in enumerate(SPANS)}
    times |= {"head wait": spans[-3] * to_us, "head": spans[-2] * to_us, "draw": spans[-1] * to_us}
    out = {}
    for name, us in times.items():
        n_bytes = matrix_bytes(config, name) if name in (*PHASES, "head") else 0
        out[name] = {
            "us": round(us, 1),
            "share": round(us / step_ms / 1e3, 4),
            "gb_s": round(n_bytes / us / 1e3),
        }
    return out, sum(spans) / step_ms / 1e6


def measure(lib: c.CDLL, name: str, kind: str, args: argparse.Namespace) -> dict[str, object]:
    """One model in one format."""
    config = Config(**MODELS[name], vocab=128256, format=kind, tied=name == "1b", shared=True)
    began = time.perf_counter()
    model = RandomModel(config)
    session = Session(lib, model, PROMPT + WARM_UP + args.steps + 8)
    built_s = time.perf_counter() - began
    try:
        gaps = time_steps(session, args.steps, not args.wait)
        spread, ghz = phases(session, config, PROMPT + WARM_UP + args.steps // 2, statistics.median(gaps))
        ids = [(i * 31 + 7) % session.vocab for i in range(512)]
        session.forward(ids, 0, c.byref(greedy()))
        began = time.perf_counter()
        session.forward(ids, 0, c.byref(greedy()))
        prompt_ms = 1e3 * (time.perf_counter() - began)
        memory = session.memory()
    finally:
        session.close()
    ordered = sorted(gaps)
    p50 = percentile(ordered, 0.5)
    n_bytes = sum(matrix_bytes(config, p) for p in (*PHASES, "head"))
    return {
        "model": name,
        "format": kind,
        "p50_ms": p50,
        "p99_ms": percentile(ordered, 0.99),
        "p999_ms": percentile(ordered, 0.999),
        "max_ms": ordered[-1],
        "p999_over_p50": percentile(ordered, 0.999) / p50,
        "first_100_ms": statistics.median(gaps[:100]),
        "last_100_ms": statistics.median(gaps[-100:]),
        "weight_bytes": n_bytes,
        "gb_s": n_bytes / p50 / 1e6,
        "prompt_512_ms": prompt_ms,
        "build_s": built_s,
        "memory_bytes": memory,
        "phases": spread,
        "ghz_if_kernel_is_all": ghz,
        "histogram_us": [round(1e3 * g, 1) for g in ordered[:: max(1, len(ordered) // 500)]],
    }


def show(row: dict[str, object], read_gb_s: float) -> None:
    """A line of the table, and its phases."""
    print(
        f"{row['model']:>3} {row['format']:>5}  p50 {row['p50_ms']:.4f}  p99 {row['p99_ms']:.4f}  p99.9 {row['p999_ms']:.4f}  "
        f"max {row['max_ms']:.4f} ms  p99.9/p50 {row['p999_over_p50']:.3f}  first {row['first_100_ms']:.4f}  last {row['last_100_ms']:.4f}  {row['gb_s']:.0f} GB/s = "
        f"{row['gb_s'] / read_gb_s:.1%} of reading  prompt 512 {row['prompt_512_ms']:.0f} ms  built in {row['build_s']:.0f} s"
    )
    print(f"      the kernel's clocks over the step's time: {row['ghz_if_kernel_is_all']:.3f} GHz")
    for name, p in row["phases"].items():
        print(f"      {name:>12} {p['us']:8.1f} us {p['share']:6.1%} {p['gb_s']:6.0f} GB/s")
    sys.stdout.flush()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--formats", nargs="+", choices=BITS, default=list(BITS))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--library", type=Path, default=None)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lib = table.load_library(args.library or table.build_library())
    read_gb_s = lib.kilat_read_bandwidth(c.c_int64(8 << 30)) / 1e9
    print(f"{torch.cuda.get_device_name()}: a plain kernel reads {read_gb_s:.0f} GB/s")
    rows = []
    for name in args.models:
        for kind in args.formats:
            rows.append(measure(lib, name, kind, args))
            show(rows[-1], read_gb_s)
            torch.cuda.empty_cache()
    if args.out:
        sha = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT
        ).stdout.strip()
        head = {
            "sha": sha,
            "device": torch.cuda.get_device_name(),
            "host": platform.node(),
            "steps": args.steps,
            "run_ahead": not args.wait,
            "read_gb_s": read_gb_s,
        }
        args.out.write_text(json.dumps({**head, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
