"""What the GPU benchmarks of the ops share: a step over scattered pages, a pool of random K and V, a model with random weights."""

import json
from pathlib import Path

import torch

from kilat.models.registry import read_config
from kilat.nn.build import Build
from kilat.nn.decoder import Decoder
from kilat.ops.batch import StepBatch
from kilat.ops.kernels import Kernels
from kilat.parallel.mesh import Mesh

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
SHAPES = Path(__file__).resolve().parent.parent / "shapes"


def decode_lengths(n_rows: int, low: int = 512, high: int = 800) -> list[int]:
    """Context lengths low .. high, the same for every run."""
    return torch.randint(low, high + 1, (n_rows,), generator=torch.Generator().manual_seed(0)).tolist()


def step(counts: list[int], lengths: list[int], page_tokens: int, n_pages: int) -> StepBatch:
    """Row b has counts[b] tokens in this step and lengths[b] of context after it; its pages are scattered over the pool."""
    g = torch.Generator().manual_seed(0)
    pages = [-(-n // page_tokens) for n in lengths]
    order = torch.randperm(n_pages, generator=g)[: sum(pages)].split(pages)
    table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    positions = torch.cat([torch.arange(k - n, k) for n, k in zip(counts, lengths)])
    row = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    slots = table[row, positions // page_tokens] * page_tokens + positions % page_tokens
    starts = torch.tensor([0, *counts]).cumsum(0)
    ids = torch.randint(0, 100_000, (len(row),), generator=g)
    tensors = (
        x.int().to(DEVICE)
        for x in (ids, positions, starts, torch.tensor(lengths), table, slots, starts[1:] - 1)
    )
    return StepBatch(*tensors, page_tokens, max(lengths), max(counts))


def random_pool(n_pages: int, layers: int, page_tokens: int, n_kv: int, dim: int) -> torch.Tensor:
    """[pages, layers, 2, page_tokens, Hkv, D] of the normal distribution."""
    pool = torch.empty(n_pages, layers, 2, page_tokens, n_kv, dim, device=DEVICE, dtype=BF16)
    for layer in range(layers):
        pool[:, layer].normal_()
    return pool


class RandomWeights:
    """A WeightSource that makes up every tensor that it is asked for."""

    def __init__(self, raw: dict) -> None:
        hidden, inner, vocab = raw["hidden_size"], raw["intermediate_size"], raw["vocab_size"]
        q, kv = raw["num_attention_heads"] * raw["head_dim"], raw["num_key_value_heads"] * raw["head_dim"]
        table = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden), "model.norm": (hidden,)}
        layer = {
            "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_norm": (raw["head_dim"],), "self_attn.k_norm": (raw["head_dim"],),
        }  # fmt: skip
        for i in range(raw["num_hidden_layers"]):
            table |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        self._shapes = {f"{name}.weight": shape for name, shape in table.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device=DEVICE, dtype=dtype)
        return torch.randn(shape, device=DEVICE, dtype=dtype) * 0.02


def raw_config(shape: str) -> dict:
    """The config.json of bench/shapes/<shape>."""
    return json.loads((SHAPES / shape / "config.json").read_text())


def random_model(shape: str, kernels: Kernels, max_model_len: int = 10_240) -> Decoder:
    """A decoder of that shape with random bf16 weights."""
    raw = raw_config(shape)
    build = Build(RandomWeights(raw), Mesh(), kernels, BF16, DEVICE, lambda name, n_bytes: None)
    return Decoder(build, read_config(raw), max_model_len)
