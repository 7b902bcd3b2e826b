"""FP8 on the device: rows quantized alone or by the kernel before have the reference's bits; products against fp64; rows independent of their batch."""

import pytest
import torch

from kilat.ops import fp8_linear as reference
from kilat.ops.kernels import triton_set
from kilat.ops.triton import fp8_linear as ops
from kilat.ops.triton.fp8_rows import Fp8Rows, quantize_rows
from tests.ops.triton.steps import Shape, error, pool, step

pytestmark = pytest.mark.gpu
ROWS = [1, 3, 8, 9, 17, 40, 64, 65, 97, 128, 200, 256, 300]
# (outputs, K): small with tails in both, cuts in K, sizes the library takes
SHAPES = [(200, 464), (1024, 8192), (6144, 1024), (16640, 512)]


@pytest.fixture(scope="module")
def fast():
    return triton_set("test", exact=False)


@pytest.fixture(scope="module")
def exact():
    return triton_set("test", exact=True)


def _rows(n_rows, n_in):
    """Rows of very different sizes, one of them zero."""
    x = torch.randn(n_rows, n_in, device="cuda") * torch.exp(3 * torch.randn(n_rows, 1, device="cuda"))
    x[n_rows // 2] *= n_rows < 3
    return x.to(torch.bfloat16)


def _case(n_rows, n_out, n_in, *, bias=False):
    w = reference.quantize_weight(torch.randn(n_out, n_in, device="cuda") * n_in**-0.5)
    b = torch.randn(n_out, device="cuda", dtype=torch.bfloat16) if bias else None
    return _rows(n_rows, n_in), ops.pack_fp8(w, b), w, b


def _product(x, w, b):
    data, scale = reference.quantize_rows(x)
    groups = scale.double().repeat_interleave(128, 1)[:, : x.shape[1]]
    exact = (data.double() * groups) @ reference.dequantize(w, torch.float64).T
    return exact if b is None else exact + b.double()


def _same(a: Fp8Rows, b: Fp8Rows) -> bool:
    n = a.n_rows
    bits = torch.equal(a.data[:n].view(torch.uint8), b.data[:n].view(torch.uint8))
    return bits and torch.equal(a.scale[:, :n], b.scale[:, :n])


@pytest.mark.parametrize("n_in", [128, 464, 4096, 14336])
def test_rows_are_quantized_as_the_reference_does(n_in):
    for n_rows in (1, 5, 64):
        x = _rows(n_rows, n_in)
        got, (data, scale) = quantize_rows(x), reference.quantize_rows(x)
        assert torch.equal(got.data[:n_rows].view(torch.uint8), data.view(torch.uint8))
        assert torch.equal(got.scale[:, :n_rows].T, scale)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_equals_the_product_of_the_quantized(fast, exact, shape):
    for n_rows in ROWS:
        x, packed, w, b = _case(n_rows, *shape, bias=n_rows % 2 == 1)
        expected = _product(x, w, b)
        for kernels in (fast, exact):
            assert error(kernels.linear(x, packed), expected) < 5e-3
            # the counters of the cuts are back at zero: the next call is right too
            assert error(kernels.linear(quantize_rows(x), packed), expected) < 5e-3


def test_exact_linear_gives_a_row_the_same_bits_in_any_batch(exact):
    for shape in SHAPES:
        x, w, _, _ = _case(300, *shape, bias=True)
        whole = exact.linear(x, w)
        for n_rows in ROWS:
            assert torch.equal(exact.linear(x[:n_rows], w), whole[:n_rows])


@pytest.mark.parametrize("n_out", [512, 400])
def test_gate_and_its_quantized_form_equal_the_gate_of_the_product(fast, exact, n_out):
    for n_rows in ROWS:
        x, packed, w, b = _case(n_rows, 2 * n_out, 1024)
        gate, up = _product(x, w, b).chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
        for kernels in (fast, exact):
            plain, rows = kernels.gated_linear(x, packed), kernels.quantized.gated_linear(x, packed)
            assert error(plain, expected) < 8e-3
            assert _same(rows, quantize_rows(plain))


def test_norms_quantize_what_they_give(fast):
    for hidden in (128, 960, 4096):
        x, residual, weight = _rows(9, hidden), _rows(9, hidden), torch.rand(hidden, device="cuda").bfloat16()
        assert _same(fast.quantized.rms_norm(x, weight, 1e-5), quantize_rows(fast.rms_norm(x, weight, 1e-5)))
        y, total = fast.add_rms_norm(x, residual.clone(), weight, 1e-5)
        rows, same_total = fast.quantized.add_rms_norm(x, residual.clone(), weight, 1e-5)
        assert _same(rows, quantize_rows(y)) and torch.equal(total, same_total)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "counts_lengths",
    [([1] * 4, [1, 17, 300, 64]), ([1] * 40, list(range(5, 205, 5))), ([1, 130], [600, 260])],
)
def test_attention_quantizes_what_it_gives(fast, exact, dim, counts_lengths):
    shape = Shape(16, 4, dim, 16)
    batch = step(*counts_lengths, shape, torch.device("cuda"))
    kv = pool(batch, shape, torch.bfloat16)
    q = torch.randn(sum(counts_lengths[0]), 16, dim, device="cuda", dtype=torch.bfloat16)
    for kernels in (fast, exact):
        plain = kernels.attention(q, kv, batch, scale=dim**-0.5)
        assert _same(kernels.quantized.attention(q, kv, batch, scale=dim**-0.5), quantize_rows(plain))


def test_fp8_weights_feed_on_quantized_rows_and_others_do_not(fast):
    _, packed, _, _ = _case(1, 512, 512)
    assert fast.feeding(packed) is fast.quantized
    assert fast.feeding(fast.pack_linear(torch.zeros(8, 8, device="cuda").bfloat16(), None)) is fast
