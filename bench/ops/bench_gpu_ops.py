"""Every op of the CUDA kernel set alone, beside the library that could take its place: microseconds, and share of the roof.

usage: python -m bench.ops.bench_gpu_ops OUT.json
"""

import json
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.ops.gpu_setup import BF16, DEVICE, decode_lengths, random_pool, step
from bench.ops.gpu_timing import BF16_FLOP_S, COPY_BYTES_S, call_us
from kilat.ops import sample as sample_reference
from kilat.ops.rope_write import Heads, QkNorm
from kilat.ops.sample import Draws
from kilat.ops.triton.kernels import triton_kernels

HIDDEN, N_Q, N_KV, DIM, LAYERS = 4096, 32, 8, 128, 32
LINEARS = {
    "qkv": (6144, 4096), "out": (4096, 4096), "llama gate_up": (28672, 4096), "llama down": (4096, 14336),
    "llama head": (128256, 4096), "qwen3 gate_up": (24576, 4096), "qwen3 down": (4096, 12288), "qwen3 head": (151936, 4096),
}  # fmt: skip
N_PAGES = 14_000
CACHE_BYTES = 150e6


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=BF16)


def roofed(us: float, n_bytes: float, flop: float = 0.0, **others: float) -> dict:
    """A result with the rate against its own roof; ``others`` are microseconds of alternatives."""
    least_us = max(n_bytes / COPY_BYTES_S, flop / BF16_FLOP_S) * 1e6
    rate = (
        {"TFLOP/s": round(flop / us / 1e6)}
        if flop / BF16_FLOP_S > n_bytes / COPY_BYTES_S
        else {"GB/s": round(n_bytes / us / 1e3)}
    )
    return {
        "us": round(us, 2),
        **rate,
        "share": round(least_us / us, 3),
        **{k: round(v, 2) for k, v in others.items()},
    }


def linears(fast, exact) -> dict:
    """Our linear and its exact form beside cuBLAS; the gate beside cuBLAS and silu_mul. Weights rotate out of the cache."""
    result = {}
    for name, (n_out, n_in) in LINEARS.items():
        n_bytes = n_out * n_in * 2
        weights = [
            fast.pack_linear(random(n_out, n_in)) for _ in range(max(2, int(CACHE_BYTES // n_bytes) + 1))
        ]
        for rows in (1, 8, 64, 256):
            x = random(rows, n_in)

            def over(f, x=x, weights=weights):
                return call_us([lambda w=w: f(x, w) for w in weights], 7)

            times = {"cublas": over(lambda x, w: F.linear(x, w.data.weight)), "exact": over(exact.linear)}
            if "gate_up" in name:
                times["cublas+silu"] = over(lambda x, w: fast.silu_mul(F.linear(x, w.data.weight)))
                us = over(fast.gated_linear)
            else:
                us = over(fast.linear)
            result[f"{name} {rows} rows"] = roofed(us, n_bytes, 2.0 * rows * n_out * n_in, **times)
    return result


def small_ops(fast, pool) -> dict:
    """Norm, rotation with page write, gate: bytes in and out over time; one call after the other on the same data, so few rows lie in L2."""
    result, weight = {}, torch.ones(HIDDEN, device=DEVICE, dtype=BF16)
    norm = QkNorm(weight[:DIM], weight[:DIM], 1e-6)
    cos_sin = torch.randn(10_240, DIM, device=DEVICE)
    for rows in (1, 8, 64, 256, 8192):
        x, residual, gate_up, qkv = (random(rows, n) for n in (HIDDEN, HIDDEN, 28672, 6144))
        batch = step([rows], [rows], 16, N_PAGES)
        heads = Heads(N_Q, N_KV, DIM)
        calls = {
            "add_rms_norm": (lambda: fast.add_rms_norm(x, residual, weight, 1e-5), 4 * 2 * HIDDEN),
            "rope_write": (lambda: fast.rope_write(qkv, cos_sin, pool[:, 1], batch, heads), 2 * 2 * 6144),
            "rope_write with head norms": (lambda: fast.rope_write(qkv, cos_sin, pool[:, 1], batch, heads, norm), 2 * 2 * 6144),
            "silu_mul": (lambda: fast.silu_mul(gate_up), 3 * 2 * 14336),
        }  # fmt: skip
        for name, (call, row_bytes) in calls.items():
            result[f"{name} {rows} rows"] = roofed(call_us([call] * 8, 7), row_bytes * rows)
    return result


def decode_attention(fast, exact, pool) -> dict:
    """All layers in turn, so that K and V come from memory; roof: their bytes."""
    cases = {f"{n} rows of 512-800": decode_lengths(n) for n in (1, 8, 64, 256)}
    cases |= {
        "1 row of 8192": [8192],
        "16 rows of 8192": [8192] * 16,
        "60 rows of 300 and 4 of 8192": [300] * 60 + [8192] * 4,
    }
    result = {}
    for name, lengths in cases.items():
        batch, q = step([1] * len(lengths), lengths, 16, N_PAGES), random(len(lengths), N_Q, DIM)
        us = [
            call_us([lambda i=i, k=k: k.attention(q, pool[:, i], batch, scale=0.09) for i in range(16)], 7)
            for k in (fast, exact)
        ]
        result[f"decode attention, {name}"] = roofed(us[0], 4 * N_KV * DIM * sum(lengths), exact=us[1])
    return result


def prompt_attention(fast, exact, pool) -> dict:
    """Causal attention of a chunk of a prompt; roof: its products. The libraries read K and V that lie in one piece."""
    result = {}
    for n, length in ((512, 512), (2048, 2048), (8192, 8192), (32768, 32768), (512, 8192)):
        batch, q = step([n], [length], 16, N_PAGES), random(n, N_Q, DIM)
        flop = 4 * DIM * N_Q * (n * length - n * n / 2)
        us = call_us([lambda: fast.attention(q, pool[:, 3], batch, scale=0.09)], 7)
        others = (
            {"exact": call_us([lambda: exact.attention(q, pool[:, 3], batch, scale=0.09)], 3)}
            if length <= 8192
            else {}
        )
        if n == length:
            k, v = random(1, N_KV, n, DIM), random(1, N_KV, n, DIM)
            heads = q.transpose(0, 1)[None]

            def library(heads=heads, k=k, v=v):
                return F.scaled_dot_product_attention(heads, k, v, is_causal=True, enable_gqa=True)

            for name, backend in (
                ("cudnn", SDPBackend.CUDNN_ATTENTION),
                ("flash2", SDPBackend.FLASH_ATTENTION),
            ):
                with sdpa_kernel(backend):
                    others[name] = call_us([library], 7)
        result[f"prompt attention, {n} of {length}"] = roofed(us, 0, flop, **others)
    return result


def draws(fast) -> dict:
    """The draw over a vocabulary of 128,256 beside its torch form; roof: the logits read once."""
    result = {}
    for rows in (1, 64, 256):
        logits, on = random(rows, 128_256) * 3, torch.ones(rows, device=DEVICE)
        some = Draws(on, (on * 0).int(), on * 0.9, on * 0, torch.rand(rows, device=DEVICE))
        for name, d, filtered in (("greedy", None, False), ("plain", some, False), ("top_p", some, True)):
            us = call_us([lambda d=d, f=filtered: fast.draw(logits, d, filtered=f)] * 2, 7)
            torch_us = call_us([lambda d=d, f=filtered: sample_reference.draw(logits, d, filtered=f)], 5)
            result[f"draw {name} {rows} rows"] = roofed(us, logits.numel() * 2, torch=torch_us)
    return result


def block_fp8() -> dict:
    """The library's block-scaled FP8 product (1x128 activations, 128x128 weights), quantisation of the activations not counted."""
    result = {}
    for name, (n_out, n_in) in (("llama gate_up", (28672, 4096)), ("llama down", (4096, 14336))):
        weights = [random(n_out, n_in).to(torch.float8_e4m3fn) for _ in range(2)]
        scale_b = (torch.rand(n_out // 128, -(-n_in // 128 // 4) * 4, device=DEVICE) + 0.5).t()
        for rows in (16, 64, 256, 8192):  # one row is not supported
            x = random(rows, n_in).to(torch.float8_e4m3fn)
            scale_a = (torch.rand(n_in // 128, rows, device=DEVICE) + 0.5).t()

            def run(w, x=x, scale_a=scale_a, scale_b=scale_b):
                kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
                return F.scaled_mm(x, w.t(), scale_a, kinds[0], scale_b, kinds[1], output_dtype=BF16)

            us = call_us([lambda w=w: run(w) for w in weights], 5)
            result[f"fp8 {name} {rows} rows"] = {
                "us": round(us, 2),
                "GB/s": round(n_out * n_in / us / 1e3),
                "TFLOP/s": round(2 * rows * n_out * n_in / us / 1e6),
            }
    return result


@torch.inference_mode()
def main() -> None:
    fast, exact = triton_kernels("benchmark"), triton_kernels("benchmark", exact=True)
    results: dict = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    pool = random_pool(N_PAGES, LAYERS, 16, N_KV, DIM)
    parts = (
        lambda: decode_attention(fast, exact, pool), lambda: prompt_attention(fast, exact, pool), lambda: small_ops(fast, pool),
        lambda: draws(fast), lambda: linears(fast, exact), block_fp8,
    )  # fmt: skip
    for part in parts:
        found = part()
        for name, r in found.items():
            print(f"{name}: {r}", flush=True)
        results |= found
    with open(sys.argv[1], "w") as f:
        json.dump(results, f, indent=1)


if __name__ == "__main__":
    main()
