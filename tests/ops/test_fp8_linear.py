"""FP8 linear: the format against fp64 arithmetic, ragged shapes, extreme and broken blocks, rows that do not see each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.ops import kernels, linear
from kilat.ops.fp8_linear import (
    BLOCK,
    FP8,
    FP8_MAX,
    SMALLEST_SCALE,
    Fp8Weight,
    dequantize,
    linear_wide,
    pack_fp8,
    quantize_rows,
    quantize_weight,
)

pytestmark = pytest.mark.cpu
SHAPES = [(128, 128), (1, 1), (130, 257), (300, 64), (127, 129), (256, 384)]
fp8 = kernels.reference()


def exact_weight(w: Fp8Weight) -> torch.Tensor:
    """The weight in fp64, block by block from the definition."""
    out = w.data.double()
    for i in range(w.scale.shape[0]):
        for j in range(w.scale.shape[1]):
            out[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] *= float(w.scale[i, j])
    return out


def exact_rows(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return data.double() * scale.double().repeat_interleave(BLOCK, 1)[:, : data.shape[1]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_weight_is_within_half_a_step_of_e4m3(shape, dtype):
    torch.manual_seed(1)
    weight = (torch.randn(shape) * torch.logspace(-3, 1, shape[0])[:, None]).to(dtype)
    w = quantize_weight(weight)
    assert w.data.dtype == FP8 and w.data.shape == shape and w.data.is_contiguous()
    assert w.scale.dtype == torch.float32 and w.scale.shape == (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
    scale = torch.ones(shape, dtype=torch.float64)
    scale = exact_weight(Fp8Weight(scale, w.scale))
    # 3 mantissa bits: half a step is 1/16 of the value, and 2^-10 scales below the normal numbers
    allowed = torch.maximum(weight.double().abs() / 16, scale * 2.0**-10) * (1 + 1e-6)
    assert ((exact_weight(w) - weight.double()).abs() <= allowed).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_each_block_uses_the_whole_range(shape):
    torch.manual_seed(2)
    w = quantize_weight(torch.randn(shape))
    top = torch.nn.functional.pad(w.data.float().abs(), (0, -shape[1] % BLOCK, 0, -shape[0] % BLOCK))
    top = top.view(w.scale.shape[0], BLOCK, w.scale.shape[1], BLOCK).amax((1, 3))
    assert (top == FP8_MAX).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_dequantized_weight_is_the_product_rounded_once(shape):
    torch.manual_seed(3)
    w = quantize_weight(torch.randn(shape))
    assert torch.equal(dequantize(w, torch.float32).double(), exact_weight(w).float().double())
    assert torch.equal(dequantize(w, torch.bfloat16), dequantize(w, torch.float32).bfloat16())


def test_quantizing_what_was_dequantized_gives_the_same_weight():
    torch.manual_seed(4)
    w = quantize_weight(torch.randn(200, 300))
    again = quantize_weight(dequantize(w, torch.float32))
    assert torch.equal(again.data.float(), w.data.float()) and torch.allclose(again.scale, w.scale, rtol=1e-6)


def test_block_of_zeros_has_scale_one_and_group_of_zeros_a_scale_above_zero():
    w = quantize_weight(torch.zeros(3, 130))
    assert (w.scale == 1).all() and (w.data.float() == 0).all()
    data, scale = quantize_rows(torch.zeros(2, 130))
    assert (scale == SMALLEST_SCALE).all() and (data.float() == 0).all()
    assert (fp8.linear(torch.zeros(2, 130), pack_fp8(w)) == 0).all()


@pytest.mark.parametrize("size", [3e38, 1e-30, 1e-44])
def test_huge_and_tiny_values_stay_finite(size):
    x = torch.tensor([[1.0, -0.5, 0.25] * 60]) * size
    w = quantize_weight(x)
    assert torch.isfinite(dequantize(w, torch.float32)).all() and (w.scale > 0).all()
    data, scale = quantize_rows(x)
    assert torch.isfinite(data.float()).all() and (scale > 0).all()
    if size > 1e-40:
        assert torch.allclose(exact_weight(w), x.double(), rtol=1 / 16)
        assert torch.allclose(exact_rows(data, scale), x.double(), rtol=1 / 16)


def test_outlier_costs_its_own_block_only():
    torch.manual_seed(5)
    weight = torch.randn(256, 256)
    quiet = quantize_weight(weight)
    weight[0, 0] = 1e6
    loud = quantize_weight(weight)
    assert torch.equal(quiet.data.float()[:, 128:], loud.data.float()[:, 128:])
    assert torch.equal(quiet.data.float()[128:], loud.data.float()[128:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_broken_value_in_a_row_makes_that_row_nan_and_no_other(bad):
    torch.manual_seed(6)
    x = torch.randn(5, 200)
    w = pack_fp8(quantize_weight(torch.randn(40, 200)))
    good = fp8.linear(x, w)
    x[2, 150] = bad
    y = fp8.linear(x, w)
    assert torch.isnan(y[2]).all()
    assert torch.equal(y[[0, 1, 3, 4]], good[[0, 1, 3, 4]])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_weight_shows_in_its_outputs(bad):
    weight = torch.randn(150, 150)
    weight[140, 3] = bad
    y = fp8.linear(torch.randn(2, 150), pack_fp8(quantize_weight(weight)))
    assert torch.isnan(y[:, 140]).all() and torch.isfinite(y[:, :128]).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
def test_product_is_that_of_the_quantized_operands(shape, dtype, wide):
    torch.manual_seed(7)
    n_out, n_in = shape
    x = torch.randn(19, n_in).to(dtype)
    bias = torch.randn(n_out).to(dtype)
    w = quantize_weight(torch.randn(shape))
    packed = pack_fp8(w, bias)
    y = linear_wide(x, packed) if wide else fp8.linear(x, packed)
    rows = x.double() if wide else exact_rows(*quantize_rows(x))
    expected = rows @ exact_weight(w).t() + bias.double()
    size = rows.abs() @ exact_weight(w).abs().t() + bias.double().abs()
    assert y.dtype == dtype and y.shape == (19, n_out)
    # fp32 sums, then one rounding to the dtype
    allowed = size * 1e-5 + expected.abs() * torch.finfo(dtype).eps / 2
    assert ((y.double() - expected).abs() <= allowed).all()


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.integers(0, 39), st.integers(1, 300), st.integers(1, 200))
def test_row_has_the_same_bits_alone_and_among_others(n_rows, row, n_in, n_out):
    row %= n_rows
    x = torch.randn(n_rows, n_in).bfloat16()
    w = pack_fp8(quantize_weight(torch.randn(n_out, n_in)))
    assert torch.equal(fp8.linear(x, w)[row : row + 1], fp8.linear(x[row : row + 1], w))


def test_reference_set_takes_either_kind_of_weight():
    torch.manual_seed(8)
    x, weight = torch.randn(4, 64), torch.randn(32, 64)
    assert torch.equal(
        fp8.linear(x, fp8.pack_linear(weight, None)), linear.linear(x, linear.pack_linear(weight))
    )
    assert fp8.pack_fp8 is not None
    packed = fp8.pack_fp8(quantize_weight(weight), None)
    assert torch.equal(fp8.gated_linear(x, packed), fp8.silu_mul(fp8.linear(x, packed)))


def test_weight_counts_a_byte_a_value_and_four_a_block():
    packed = pack_fp8(quantize_weight(torch.randn(130, 257)))
    assert packed.n_bytes == 130 * 257 + 4 * 2 * 3
    assert packed.shape == (130, 257)
