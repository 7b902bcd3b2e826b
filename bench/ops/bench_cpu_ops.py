"""Time of the CPU kernels on the shapes of two models, beside torch and beside what the machine can do, all in one run.

    python bench/ops/bench_cpu_ops.py [--threads 2] [--models smollm2,qwen2.5] [--budget-s 0.3] [--json OUT.json]

Ours and torch take turns, so that a slow stretch of the machine hits both; the best call of each counts. Weights and pages
are cold: each call takes the next of several copies, together larger than the caches, as the layers of a model are. Shares: of the
measured read bandwidth for what reads much (linear up to 4 rows, decode attention), else of the measured bf16 product rate.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional

from kilat.cli.machine import read_machine, source_sha
from kilat.ops.batch import StepBatch
from kilat.ops.cpu.build import compiler
from kilat.ops.cpu.kernels import cpu_kernels
from kilat.ops.kernels import Kernels
from kilat.ops.rope_write import Heads

DTYPE = torch.bfloat16
COLD_BYTES = 192 << 20
ROWS = (1, 4, 16, 32, 64, 512)
PAGE_TOKENS = 16
SEED = 0
TURNS = 4


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    inter: int
    n_q: int
    n_kv: int
    dim: int
    layers: int
    vocab: int

    def linears(self) -> dict[str, tuple[int, int]]:
        """Name -> (outputs, inputs)."""
        return {
            "qkv": ((self.n_q + 2 * self.n_kv) * self.dim, self.hidden),
            "out": (self.hidden, self.n_q * self.dim),
            "gate_up": (2 * self.inter, self.hidden),
            "down": (self.hidden, self.inter),
            "lm_head": (self.vocab, self.hidden),
        }


MODELS = {
    "smollm2": Model("smollm2", 576, 1536, 9, 3, 64, 30, 49152),
    "qwen2.5": Model("qwen2.5", 896, 4864, 14, 2, 64, 24, 151936),
}


@dataclass(frozen=True)
class Result:
    """``reads_bytes`` and ``flops`` of one call; ``torch_us`` None where torch has no such op."""

    op: str
    model: str
    shape: str
    us: float
    torch_us: float | None
    reads_bytes: int
    flops: int
    bound: str

    def share(self, limits: "Limits") -> float:
        """Of the limit that bounds it: "read" or "bf16"."""
        if self.bound == "read":
            return self.reads_bytes / self.us / 1e3 / limits.read_gb_s
        return self.flops / self.us / 1e3 / limits.bf16_gflops


@dataclass(frozen=True)
class Limits:
    bf16_gflops: float
    fp32_gflops: float
    read_gb_s: float

    def raised_to(self, other: "Limits") -> "Limits":
        """The better of two measurements: on a shared machine each is a lower bound."""
        return Limits(**{k: max(v, asdict(other)[k]) for k, v in asdict(self).items()})


def measure_limits(threads: int) -> Limits:
    """Build and run machine_limits.cpp."""
    cxx = compiler()
    if cxx is None:
        raise SystemExit("no C++ compiler: neither the kernels nor the limits can be built")
    source = Path(__file__).with_name("machine_limits.cpp")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "limits"
        flags = ["-O2", "-std=c++17", "-march=native", "-pthread"]
        subprocess.run([cxx, *flags, str(source), "-o", str(out)], check=True)
        text = subprocess.run([str(out), str(threads)], check=True, capture_output=True, text=True).stdout
    return Limits(**json.loads(text))


def best_us(
    ours: Callable[[int], object], other: Callable[[int], object] | None, budget_s: float
) -> list[float]:
    """Best microseconds of a call of each, in turns of many calls: threads of the one spin for a while after its last call, which
    would slow the first calls of the other."""
    calls = [ours] if other is None else [ours, other]
    best = [float("inf")] * len(calls)
    for _ in range(TURNS):
        for j, call in enumerate(calls):
            end = time.perf_counter() + budget_s / TURNS
            i = 0
            while i < 3 or time.perf_counter() < end:
                start = time.perf_counter()
                call(i)
                best[j] = min(best[j], time.perf_counter() - start)
                i += 1
    return [b * 1e6 for b in best]


class Bench:
    """One run: the kernels and the results so far."""

    def __init__(self, kernels: Kernels, budget_s: float) -> None:
        self.kernels = kernels
        self.budget_s = budget_s
        self.results: list[Result] = []

    def add(
        self, op: str, model: Model, shape: str, times: list[float], *, reads: int, flops: int, bound: str
    ) -> None:
        other = times[1] if len(times) > 1 else None
        self.results.append(Result(op, model.name, shape, times[0], other, reads, flops, bound))

    def linears(self, model: Model) -> None:
        for name, (n, k) in model.linears().items():
            n_bytes = n * k * 2
            copies = max(1, COLD_BYTES // n_bytes)
            weights = [torch.randn(n, k).to(DTYPE) for _ in range(copies)]
            packed = [self.kernels.pack_linear(w, None) for w in weights]
            for rows in ROWS if name != "lm_head" else ROWS[:-1]:
                x = torch.randn(rows, k).to(DTYPE)
                times = best_us(
                    lambda i, x=x: self.kernels.linear(x, packed[i % copies]),
                    lambda i, x=x: functional.linear(x, weights[i % copies]),
                    self.budget_s,
                )
                bound = "read" if rows <= 4 else "bf16"
                shape = f"{rows} x {k} -> {n}"
                work = {"reads": n_bytes, "flops": 2 * n * k * rows, "bound": bound}
                self.add(f"linear {name}", model, shape, times, **work)
                if name == "gate_up":
                    times = best_us(
                        lambda i, x=x: self.kernels.gated_linear(x, packed[i % copies]),
                        lambda i, x=x: gated(functional.linear(x, weights[i % copies])),
                        self.budget_s,
                    )
                    self.add("gated_linear", model, shape, times, **work)

    def small(self, model: Model) -> None:
        for rows in ROWS:
            x, gates = torch.randn(rows, model.hidden).to(DTYPE), torch.randn(rows, 2 * model.inter).to(DTYPE)
            residual, weight = torch.randn_like(x), torch.randn(model.hidden).to(DTYPE)
            times = best_us(
                lambda _, x=x, r=residual, w=weight: self.kernels.add_rms_norm(x, r, w, 1e-5),
                lambda _, x=x, r=residual, w=weight: functional.rms_norm(x + r, (model.hidden,), w, 1e-5),
                self.budget_s / 3,
            )
            n = x.numel()
            self.add(
                "add_rms_norm",
                model,
                f"{rows} x {model.hidden}",
                times,
                reads=4 * n,
                flops=4 * n,
                bound="read",
            )
            times = best_us(
                lambda _, g=gates: self.kernels.silu_mul(g),
                lambda _, g=gates: gated(g),
                self.budget_s / 3,
            )
            n = rows * model.inter
            self.add(
                "silu_mul", model, f"{rows} x {model.inter}", times, reads=4 * n, flops=2 * n, bound="read"
            )
            self.rope(model, rows)

    def rope(self, model: Model, rows: int) -> None:
        batch, heads = step([1] * rows, [1] * rows), Heads(model.n_q, model.n_kv, model.dim)
        kv = torch.zeros(rows, 2, PAGE_TOKENS, model.n_kv, model.dim, dtype=DTYPE)
        qkv = torch.randn(rows, (model.n_q + 2 * model.n_kv) * model.dim).to(DTYPE)
        table = torch.randn(8, model.dim)
        times = best_us(
            lambda _: self.kernels.rope_write(qkv, table, kv, batch, heads), None, self.budget_s / 3
        )
        self.add("rope_write", model, f"{rows} tokens", times, reads=2 * qkv.numel(), flops=0, bound="read")

    def attention(self, model: Model) -> None:
        for context in (128, 1024, 4096):
            for rows in (1, 16):
                self.attention_case(model, [1] * rows, [context] * rows, "attention decode")
            self.attention_case(model, [context], [context], "attention prefill")

    def attention_case(self, model: Model, counts: list[int], lengths: list[int], op: str) -> None:
        batch = step(counts, lengths)
        n_pages = sum(-(-n // PAGE_TOKENS) for n in lengths)
        layer = 2 * PAGE_TOKENS * model.n_kv * model.dim
        layers = max(1, min(model.layers, (COLD_BYTES * 2) // (n_pages * layer * 2)))
        shape = (n_pages, layers, 2, PAGE_TOKENS, model.n_kv, model.dim)
        pool = torch.randn(1, *shape[1:]).to(DTYPE).repeat(n_pages, 1, 1, 1, 1, 1)
        tokens, context = sum(counts), lengths[0]
        q = torch.randn(tokens, model.n_q, model.dim).to(DTYPE)
        # torch: the same work on keys that are already gathered, one copy per layer would not fit: its inputs are warm
        b, t = len(counts), counts[0]
        qt = q.view(b, t, model.n_q, model.dim).transpose(1, 2)
        kt = torch.randn(b, model.n_kv, context, model.dim).to(DTYPE)
        times = best_us(
            lambda i: self.kernels.attention(q, pool[:, i % layers], batch, scale=model.dim**-0.5),
            lambda _: functional.scaled_dot_product_attention(qt, kt, kt, is_causal=t > 1, enable_gqa=True),
            self.budget_s,
        )
        seen = sum(sum(range(n - c + 1, n + 1)) for c, n in zip(counts, lengths))
        reads = sum(lengths) * 2 * model.n_kv * model.dim * 2
        bound = "read" if t == 1 else "bf16"
        name = f"{b} x {t} of {context}"
        self.add(op, model, name, times, reads=reads, flops=4 * seen * model.n_q * model.dim, bound=bound)


def step(counts: list[int], lengths: list[int]) -> StepBatch:
    """Rows whose pages are scattered over the pool."""
    n_pages = [-(-n // PAGE_TOKENS) for n in lengths]
    order = torch.randperm(sum(n_pages), generator=torch.Generator().manual_seed(SEED)).int()
    table = torch.zeros(len(counts), max(n_pages), dtype=torch.int32)
    taken = 0
    for b, n in enumerate(n_pages):
        table[b, :n] = order[taken : taken + n]
        taken += n
    positions = torch.cat([torch.arange(k - n, k) for n, k in zip(counts, lengths)])
    row = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    slots = table[row, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    return StepBatch(
        token_ids=positions.int(),
        positions=positions.int(),
        row_start=torch.tensor(starts, dtype=torch.int32),
        kv_len=torch.tensor(lengths, dtype=torch.int32),
        page_table=table,
        slots=slots.int(),
        logits_at=torch.zeros(1, dtype=torch.int32),
        page_tokens=PAGE_TOKENS,
        max_kv_len=max(lengths),
        max_q_len=max(counts),
    )


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def line(r: Result, limits: Limits) -> str:
    other = "" if r.torch_us is None else f"torch {r.torch_us:10.1f} us {r.torch_us / r.us:6.2f}x"
    rate = f"{r.reads_bytes / r.us / 1e3:7.1f} GB/s {r.flops / r.us / 1e3:7.1f} GFLOP/s"
    name = f"{r.model:8} {r.op:18} {r.shape:20}"
    return f"{name} {r.us:10.1f} us {rate} {r.share(limits):5.0%} of {r.bound:4} {other}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--budget-s", type=float, default=0.3, help="seconds for each side of a case")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(args.threads)
    limits = measure_limits(args.threads)
    kernels = cpu_kernels(args.threads)
    bench = Bench(kernels, args.budget_s)
    for name in args.models.split(","):
        for case in (bench.linears, bench.small, bench.attention):
            case(MODELS[name])
            limits = limits.raised_to(measure_limits(args.threads))
    print(f"{kernels.name}, {args.threads} threads, limits: {limits}")
    for result in bench.results:
        print(line(result, limits))
    if args.json:
        report = {
            "sha": source_sha(),
            "machine": asdict(read_machine()),
            "kernels": kernels.name,
            "threads": args.threads,
            "dtype": "bfloat16",
            "seed": SEED,
            "limits": asdict(limits),
            "results": [{**asdict(r), "share": round(r.share(limits), 3)} for r in bench.results],
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
