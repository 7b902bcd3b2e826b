"""Products with quantized weights by block format, beside the same shape in bf16, and what the machine can do, all in one run.

    python bench/ops/bench_cpu_quant.py [--threads 2] [--models smollm2,qwen2.5] [--rows 1,2,4,16,64] [--budget-s 0.2] [--json OUT.json]

Inputs are rounded up to whole blocks. Weights are cold: each call takes the next of several copies, together larger than the caches. The two take turns and the best call
of each counts. Shares are of the measured read bandwidth; at many rows the products are the limit, and the rate is in GFLOP/s.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from bench_cpu_ops import COLD_BYTES, DTYPE, MODELS, SEED, Limits, best_us, measure_limits

from kilat.base.gguf_header import GGML_TYPES
from kilat.cli.machine import read_machine, source_sha
from kilat.ops.cpu.kernels import cpu_kernels
from kilat.ops.kernels import Kernels
from kilat.ops.linear import BlockWeight, LinearWeight


@dataclass(frozen=True)
class Case:
    op: str
    model: str
    type: str
    rows: int
    n: int
    k: int
    us: float
    bf16_us: float
    bytes: int

    def share(self, limits: Limits) -> float:
        return self.bytes / self.us / 1e3 / limits.read_gb_s


def random_blocks(ggml_type: int, n: int, k: int) -> BlockWeight:
    """Any bytes are a weight; time does not depend on them."""
    kind = GGML_TYPES[ggml_type]
    data = torch.randint(0, 100, (n, k // kind.block_items * kind.block_bytes), dtype=torch.uint8)
    return BlockWeight(data, ggml_type, (n, k))


def measure(
    kernels: Kernels, name: str, model: str, shape: tuple[int, int], rows: list[int], budget_s: float
) -> list[Case]:
    """All formats of one shape, bf16 beside each."""
    n, k = shape
    blocks = kernels.blocks
    assert blocks is not None
    cases = []
    width, plain = 0, list[LinearWeight]()
    for ggml_type, values in blocks.types.items():
        padded = -(-k // values) * values
        if padded != width:
            width, copies = padded, max(1, COLD_BYTES // (n * padded * 2))
            plain = [kernels.pack_linear(torch.randn(n, width).to(DTYPE), None) for _ in range(copies)]
        block = random_blocks(ggml_type, n, padded)
        packed = [blocks.pack([block], None)]
        packed += [blocks.pack([block], None) for _ in range(max(0, COLD_BYTES // packed[0].n_bytes))]
        for m in rows:
            x = torch.randn(m, padded).to(DTYPE)
            us, bf16_us = best_us(
                lambda i, x=x, w=packed: kernels.linear(x, w[i % len(w)]),
                lambda i, x=x, w=plain: kernels.linear(x, w[i % len(w)]),
                budget_s,
            )
            kind = GGML_TYPES[ggml_type].name
            cases.append(Case(name, model, kind, m, n, padded, us, bf16_us, packed[0].n_bytes))
    return cases


def line(c: Case, limits: Limits) -> str:
    rate = f"{c.bytes / c.us / 1e3:6.1f} GB/s {c.share(limits):5.0%} {2 * c.rows * c.n * c.k / c.us / 1e3:7.1f} GFLOP/s"
    shape = f"{c.rows} x {c.k} -> {c.n}"
    return f"{c.model:8} {c.op:8} {c.type:5} {shape:22} {c.us:9.1f} us {rate}   bf16 {c.bf16_us:9.1f} us {c.bf16_us / c.us:5.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ops", default="qkv,gate_up,down,lm_head")
    parser.add_argument("--rows", default="1,2,4,16,64")
    parser.add_argument("--budget-s", type=float, default=0.2, help="seconds for each side of a case")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(args.threads)
    limits = measure_limits(args.threads)
    kernels = cpu_kernels(args.threads)
    rows = [int(r) for r in args.rows.split(",")]
    cases: list[Case] = []
    for model in args.models.split(","):
        linears = MODELS[model].linears()
        for op in args.ops.split(","):
            cases += measure(kernels, op, model, linears[op], rows, args.budget_s)
        limits = limits.raised_to(measure_limits(args.threads))
    print(f"{kernels.name}, {args.threads} threads, limits: {limits}")
    for case in cases:
        print(line(case, limits))
    if args.json:
        report = {
            "sha": source_sha(),
            "machine": asdict(read_machine()),
            "kernels": kernels.name,
            "threads": args.threads,
            "seed": SEED,
            "limits": asdict(limits),
            "results": [{**asdict(c), "share": round(c.share(limits), 3)} for c in cases],
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
