"""FP8 weights of layers: the same numbers in every share, stored blocks kept where they fit, bytes counted as stored."""

import dataclasses

import pytest
import torch

from kilat.nn.attention import AttentionConfig
from kilat.nn.build import Build, DummyBuild, NoWeights
from kilat.nn.decoder import Decoder, DecoderConfig
from kilat.nn.linear import RowParallel, column_parallel
from kilat.nn.rotary import Rope
from kilat.ops import kernels
from kilat.ops.fp8_linear import FP8, Fp8Weight, dequantize, quantize_weight
from kilat.parallel.mesh import Mesh

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")


class Weights:
    """Named tensors; those in ``stored`` are in FP8 blocks already."""

    def __init__(self, tensors: dict[str, torch.Tensor], stored: tuple[str, ...] = ()) -> None:
        self.tensors = tensors
        self.stored = {name: quantize_weight(tensors[name]) for name in stored}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(t.shape) for name, t in self.tensors.items()}

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.tensors[name].to(dtype)

    def get_fp8(self, name: str) -> Fp8Weight | None:
        return self.stored.get(name)


class Share(Mesh):
    """One rank of several whose sum over the ranks is made by the test."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


@dataclasses.dataclass
class Heard:
    """What a build said."""

    n_bytes: int = 0
    requantized: list[str] = dataclasses.field(default_factory=list)

    def weight(self, name: str, n_bytes: int) -> None:
        self.n_bytes += n_bytes


def build_of(weights, mesh=Mesh(), heard=None, *, dtype=torch.float32, ops=None) -> Build:
    heard = heard or Heard()
    ops = ops or kernels.reference()
    return Build(
        weights, mesh, ops, dtype, CPU, heard.weight, fp8=True, on_requantized=heard.requantized.append
    )


def tensors(**shapes: tuple[int, int]) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return {
        f"{name}.weight": torch.randn(shape, generator=g) * torch.rand(shape[0], 1, generator=g).mul(8).exp()
        for name, shape in shapes.items()
    }


def same(a: Fp8Weight, b: Fp8Weight) -> bool:
    return torch.equal(a.data.float(), b.data.float()) and torch.equal(a.scale, b.scale)


@pytest.mark.parametrize("stored", [False, True])
def test_fused_parts_of_whole_blocks_keep_the_numbers_they_have_alone(stored):
    parts = tensors(q=(256, 200), k=(128, 200), v=(100, 200))
    heard = Heard()
    weights = Weights(parts, tuple(parts) if stored else ())
    w = column_parallel(build_of(weights, heard=heard), [("q", 256), ("k", 128), ("v", 100)], 200, bias=False)
    alone = [dequantize(quantize_weight(t), torch.float32) for t in parts.values()]
    assert torch.equal(dequantize(w.data, torch.float32), torch.cat(alone))
    assert heard.requantized == []


def test_fused_parts_that_end_inside_blocks_are_quantized_as_one():
    parts = tensors(q=(200, 64), k=(72, 64))
    w = column_parallel(build_of(Weights(parts)), [("q", 200), ("k", 72)], 64, bias=False)
    assert same(w.data, quantize_weight(torch.cat(list(parts.values()))))


def test_stored_blocks_that_do_not_fit_are_requantized_from_fp32_and_named():
    parts = tensors(q=(200, 64), k=(72, 64))
    heard = Heard()
    # bf16 build: a detour over it would round the values once more
    build = build_of(Weights(parts, tuple(parts)), heard=heard, dtype=torch.bfloat16)
    w = column_parallel(build, [("q", 200), ("k", 72)], 64, bias=False)
    assert heard.requantized == ["q.weight", "k.weight"]
    exact = torch.cat([dequantize(quantize_weight(t), torch.float32) for t in parts.values()])
    assert same(w.data, quantize_weight(exact))


@pytest.mark.parametrize("stored", [False, True])
def test_shares_of_two_ranks_have_the_numbers_of_one(stored):
    parts = tensors(gate=(512, 96), up=(512, 96), down=(96, 512))
    weights = Weights(parts, tuple(parts) if stored else ())
    fused = [("gate", 512), ("up", 512)]
    whole = dequantize(column_parallel(build_of(weights), fused, 96, bias=False).data, torch.float32)
    down = dequantize(RowParallel(build_of(weights), "down", 96, 512, bias=False).weight.data, torch.float32)
    for rank in range(2):
        build = build_of(weights, Share(rank, 2))
        rows = slice(256 * rank, 256 * rank + 256)
        share = dequantize(column_parallel(build, fused, 96, bias=False).data, torch.float32)
        assert torch.equal(share, torch.cat([whole[:512][rows], whole[512:][rows]]))
        inner = RowParallel(build, "down", 96, 512, bias=False).weight.data
        assert torch.equal(dequantize(inner, torch.float32), down[:, rows])


def test_shares_that_cut_blocks_still_add_up_nearly():
    parts = tensors(down=(40, 192))
    weights = Weights(parts)
    x = torch.randn(3, 192, generator=torch.Generator().manual_seed(4))
    whole = RowParallel(build_of(weights), "down", 40, 192, bias=False)(x)
    shares = [RowParallel(build_of(weights, Share(r, 2)), "down", 40, 192, bias=False) for r in range(2)]
    total = shares[0](x[:, :96]) + shares[1](x[:, 96:])
    assert (total - whole).norm() < 0.1 * whole.norm()


def test_set_without_fp8_product_gets_the_same_weights_in_its_dtype():
    parts = tensors(down=(128, 256))
    ops = dataclasses.replace(kernels.reference(), pack_fp8=None)
    heard = Heard()
    w = RowParallel(build_of(Weights(parts), heard=heard, ops=ops), "down", 128, 256, bias=False).weight
    assert torch.equal(w.data, dequantize(quantize_weight(parts["down.weight"]), torch.float32))
    assert heard.n_bytes == 128 * 256 * 4


def tiny_config() -> DecoderConfig:
    attention = AttentionConfig(256, 4, 2, 64, qkv_bias=True)
    rope = Rope(64, 10_000.0, 64, {"type": "default"})
    return DecoderConfig(
        50, 256, 384, 1e-6, rope, [attention] * 2, mlp_bias=False, tied=False, max_positions=64
    )


@pytest.mark.parametrize("dummy", [False, True])
def test_layers_are_fp8_and_counted_so_while_embedding_head_and_norms_are_not(dummy):
    config, heard = tiny_config(), Heard()
    if dummy:
        build = DummyBuild(
            NoWeights(), Mesh(), kernels.reference(), torch.bfloat16, CPU, heard.weight, fp8=True
        )
    else:
        build = build_of(Weights(checkpoint(config)), heard=heard, dtype=torch.bfloat16)
    model = Decoder(build, config, 64)
    linears = [
        w
        for a in model.layers
        for w in (a.attention.qkv, a.attention.out.weight, a.mlp.gate_up, a.mlp.down.weight)
    ]
    assert all(w.data.data.dtype == FP8 for w in linears)
    assert model.head.dtype == model.embedding.dtype == torch.bfloat16
    plain = 2 * (2 * 50 * 256 + 256) + 2 * 2 * (2 * 256 + 512)
    values = 2 * (512 * 256 + 256 * 256 + 768 * 256 + 256 * 384)
    blocks = 2 * (4 * 2 + 2 * 2 + 6 * 2 + 2 * 3)
    assert heard.n_bytes == plain + values + 4 * blocks


def checkpoint(config: DecoderConfig) -> dict[str, torch.Tensor]:
    h, inner, found = config.hidden, config.inner, {}
    for i in range(len(config.attention)):
        p = f"model.layers.{i}"
        shapes = {"q": (256, h), "k": (128, h), "v": (128, h), "o": (h, 256)}
        found |= {f"{p}.self_attn.{n}_proj.weight": torch.randn(s) for n, s in shapes.items()}
        found |= {f"{p}.self_attn.{n}_proj.bias": torch.randn(s[0]) for n, s in shapes.items() if n != "o"}
        shapes = {"gate": (inner, h), "up": (inner, h), "down": (h, inner)}
        found |= {f"{p}.mlp.{n}_proj.weight": torch.randn(s) for n, s in shapes.items()}
        found |= {f"{p}.{n}_layernorm.weight": torch.ones(h) for n in ("input", "post_attention")}
    return found | {
        "model.norm.weight": torch.ones(h),
        "model.embed_tokens.weight": torch.randn(config.vocab_size, h),
        "lm_head.weight": torch.randn(config.vocab_size, h),
    }


def test_dummy_weights_have_the_size_of_real_ones():
    build = DummyBuild(
        NoWeights(), Mesh(), kernels.reference(), torch.bfloat16, CPU, lambda n, b: None, fp8=True
    )
    w = build.read_linear("x", (300, 200))
    assert isinstance(w, Fp8Weight) and w.scale.shape == (3, 2)
    values = dequantize(w, torch.float32)
    assert 0.018 < float(values.std()) < 0.022 and torch.isfinite(values).all()
