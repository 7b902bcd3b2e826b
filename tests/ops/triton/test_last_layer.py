"""A decoder whose last layer computes the wanted tokens alone, with the exact kernels: the bits of the whole layer. Parts of packed weights."""

import dataclasses

import pytest
import torch

from kilat.nn import wanted
from kilat.nn.attention import AttentionConfig
from kilat.nn.build import DummyBuild, NoWeights
from kilat.nn.decoder import Decoder, DecoderConfig
from kilat.nn.rotary import Rope
from kilat.ops import kernels
from kilat.ops.fp8_linear import FP8, quantize_weight
from kilat.ops.rope_write import KvScale
from kilat.ops.triton import fp8_linear, linear
from kilat.ops.triton.kernels import triton_kernels
from kilat.parallel.mesh import Mesh
from tests.ops.triton.steps import Shape, step

COUNTS, LENGTHS = [1, 20, 0, 1, 40, 5], [40, 20, 0, 1, 330, 65]


def exact_set(device: torch.device) -> kernels.Kernels:
    """The exact set; where kernels are interpreted, with the reference's products, for its own are not interpreted."""
    ops = triton_kernels("test", exact=True, device=device)
    if device.type == "cuda":
        return ops
    r = kernels.reference()
    return dataclasses.replace(
        ops,
        pack_linear=r.pack_linear,
        linear=r.linear,
        cut_linear=r.cut_linear,
        fused_gate=None,
        quantized=None,
    )


def model_of(device: torch.device, dtype: torch.dtype, fp8: bool) -> Decoder:
    torch.manual_seed(1)
    attention = AttentionConfig(128, 4, 2, 64, qkv_bias=True, qk_norm_eps=1e-6)
    rope = Rope(64, 10_000.0, 64, {"type": "default"})
    config = DecoderConfig(64, 128, 256, 1e-6, rope, [attention] * 2, False, False, 512)
    ops = exact_set(device)
    build = DummyBuild(NoWeights(), Mesh(), ops, dtype, device, lambda n, b: None, fp8=fp8)
    return Decoder(build, config, 512)


@pytest.mark.parametrize("pages", ["half", "e4m3"])
@pytest.mark.parametrize("fp8", [False, True], ids=["half", "fp8"])
@pytest.mark.parametrize("at", [[0, 20, 21, 61, 66], [50, 21, 30, 0, 0]], ids=str)
def test_logits_and_pages_have_the_bits_of_the_whole_layer(device, half, at, fp8, pages, monkeypatch):
    if fp8 and device.type == "cpu":
        pytest.skip("products with FP8 weights are not interpreted")
    if pages == "e4m3" and device.type == "cpu" and at[0]:
        pytest.skip("e4m3 is interpreted slowly: once is enough")
    model = model_of(device, half, fp8)
    batch = step(COUNTS, LENGTHS, Shape(4, 2, 64, 16), device)
    ids = torch.randint(0, 64, (sum(COUNTS),), dtype=torch.int32).to(device)
    batch = dataclasses.replace(
        batch, token_ids=ids, logits_at=torch.tensor(at, dtype=torch.int32, device=device)
    )
    if pages == "e4m3":
        scale = torch.tensor([0.5, 0.25], device=device)
        model.scale_kv([KvScale(scale, scale)] * 2)
    old = torch.randn(int(batch.page_table.max()) + 1, 2, 2, 16, 2, 64).to(device, half)
    results = []
    for least in (1, 10_000):
        monkeypatch.setattr(wanted, "LEAST_TOKENS", least)
        assert wanted.pays(batch) == (least == 1)
        kv = old.to(FP8) if pages == "e4m3" else old.clone()
        with torch.inference_mode():
            results.append((model(batch, kv), kv.float()))
    (logits, written), (expected, expected_written) = results
    assert torch.equal(logits, expected) and torch.equal(written, expected_written)
    assert logits.shape == (5, 64) and logits.isfinite().all() and logits.float().std() > 0


@pytest.mark.cpu
def test_parts_of_packed_weights_are_views_with_their_own_scales_and_bias():
    weight, bias = torch.randn(384, 160), torch.randn(384)
    part = linear.cut_linear(linear.pack_linear(weight, bias), slice(256, 384))
    assert part.shape == (128, 160) and part.data.weight.data_ptr() == weight[256:].data_ptr()
    assert torch.equal(part.bias, bias[256:])
    stored = quantize_weight(weight)
    packed = fp8_linear.pack_fp8(stored, bias)
    part = linear.cut_linear(packed, slice(256, 384))
    assert part.dtype == FP8 and part.data.weight.data_ptr() == packed.data.weight[256:].data_ptr()
    assert torch.equal(part.data.scale[:, :2], stored.scale[2:]) and torch.equal(part.bias, bias[256:])


@pytest.mark.cpu
def test_fp8_weight_has_no_part_that_cuts_a_block():
    packed = fp8_linear.pack_fp8(quantize_weight(torch.randn(320, 128)))
    assert linear.cut_linear(packed, slice(64, 320)) is None
    assert linear.cut_linear(packed, slice(0, 192)) is None
    assert linear.cut_linear(packed, slice(256, 320)).shape == (64, 128)
