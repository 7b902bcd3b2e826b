"""One whole step of a model with random weights from the CUDA kernel sets: decode steps in a graph (draw included), and a long prompt.

usage: python -m bench.ops.bench_gpu_step OUT.json [SHAPE ...]      shapes: folders of bench/shapes
"""

import json
import statistics
import sys
import time

import torch

from bench.ops.gpu_setup import decode_lengths, random_model, random_pool, raw_config, step
from bench.ops.gpu_timing import BF16_FLOP_S, COPY_BYTES_S, graph_of, replay_us
from kilat.ops.triton.kernels import triton_kernels

PAGE_TOKENS = 16
ROWS = (1, 8, 64, 256)
PROMPT = 8192


def floor_ms(raw: dict, lengths: list[int]) -> float:
    """The least time of a decode step: weights or products, whichever takes longer, then the K and V of all rows."""
    layer = (
        raw["hidden_size"] * (raw["num_attention_heads"] + 2 * raw["num_key_value_heads"]) * raw["head_dim"]
    )
    layer += raw["hidden_size"] * raw["num_attention_heads"] * raw["head_dim"]
    layer += 3 * raw["hidden_size"] * raw["intermediate_size"]
    parameters = layer * raw["num_hidden_layers"] + raw["hidden_size"] * raw["vocab_size"]
    kv = 4 * raw["num_hidden_layers"] * raw["num_key_value_heads"] * raw["head_dim"] * sum(lengths)
    linear_s = max(2 * parameters / COPY_BYTES_S, 2 * parameters * len(lengths) / BF16_FLOP_S)
    return (linear_s + kv / COPY_BYTES_S) * 1e3


def kernel_times(run) -> list[tuple[str, int, float]]:
    """(kernel, calls, total ms) of one run, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found = [
        (e.key[:60], e.count, e.device_time_total / 1e3)
        for e in profile.key_averages()
        if e.device_time_total > 0
    ]
    return sorted(found, key=lambda f: -f[2])[:10]


def measure(shape: str, *, exact: bool) -> dict:
    raw = raw_config(shape)
    layers = raw["num_hidden_layers"]
    pool = random_pool(14_000, layers, PAGE_TOKENS, raw["num_key_value_heads"], raw["head_dim"])
    kernels = triton_kernels("benchmark", exact=exact)
    model = random_model(shape, kernels)
    result = {}
    for n_rows in ROWS:
        lengths = decode_lengths(n_rows)
        batch = step([1] * n_rows, lengths, PAGE_TOKENS, len(pool))
        graph = graph_of([lambda b=batch: kernels.draw(model(b, pool), None, filtered=False)])
        ms, least = replay_us(graph, 20) / 1e3, floor_ms(raw, lengths)
        result[f"decode_{n_rows}_rows"] = {
            "ms": round(ms, 3),
            "floor_ms": round(least, 3),
            "share": round(least / ms, 3),
        }
        print(
            shape, "exact" if exact else "fast", n_rows, "rows:", result[f"decode_{n_rows}_rows"], flush=True
        )
        del graph
    batch = step([PROMPT], [PROMPT], PAGE_TOKENS, len(pool))
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model(batch, pool)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    result[f"prompt_{PROMPT}_ms"] = round(statistics.median(times), 1)
    print(shape, "exact" if exact else "fast", "prompt:", [round(t, 1) for t in times], flush=True)
    if not exact:
        result["prompt_kernels_ms"] = [
            (k, n, round(t, 2)) for k, n, t in kernel_times(lambda: model(batch, pool))
        ]
        print(*result["prompt_kernels_ms"], sep="\n", flush=True)
    return result


@torch.inference_mode()
def main() -> None:
    out, shapes = sys.argv[1], sys.argv[2:] or ["llama31-8b"]
    results = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "page_tokens": PAGE_TOKENS}
    for shape in shapes:
        for exact in (False, True) if shape == shapes[0] else (False,):
            results[f"{shape} {'exact' if exact else 'fast'}"] = measure(shape, exact=exact)
            torch.cuda.empty_cache()
    with open(out, "w") as f:
        json.dump(results, f, indent=1)


if __name__ == "__main__":
    main()
