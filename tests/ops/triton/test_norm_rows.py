"""A product that ends in the residual and the norm after it, and the products that take its rows: against the ops one by one."""

import pytest
import torch

from kilat.ops import fp8_linear as reference
from kilat.ops.kernels import triton_set
from kilat.ops.rms_norm import add_rms_norm
from kilat.ops.triton import fp8_linear, linear
from kilat.ops.triton.fp8_rows import Fp8Rows
from kilat.ops.triton.norm_rows import MOST_ROWS, NormRows
from tests.ops.triton.steps import error

pytestmark = pytest.mark.gpu
ROWS = [1, 2, 3, 5, 8, 9, 64, 65, 200]
EPS = 1e-5
# (hidden, K): one tile, tails in tiles and K, cuts in K
SHAPES = [(64, 256), (1096, 968), (1024, 8192)]
FP8_SHAPES = [(128, 256), (1152, 640), (1024, 8192)]


@pytest.fixture(scope="module")
def kernels():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return triton_set("test", exact=False)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def residual_of(n_rows: int, hidden: int) -> torch.Tensor:
    """Rows of different sizes."""
    return randn(n_rows, hidden) * torch.exp(torch.randn(n_rows, 1, device="cuda")).to(torch.bfloat16)


def values(rows: Fp8Rows) -> torch.Tensor:
    """Of quantized rows."""
    groups = rows.scale.double().T.repeat_interleave(128, 1)[:, : rows.data.shape[1]]
    return (rows.data.double() * groups)[: rows.n_rows]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_in_bf16_are_those_of_the_ops_one_by_one(kernels, shape):
    hidden, n_in = shape
    for n_rows in ROWS:
        bias = randn(hidden) if n_rows % 2 else None
        w = linear.pack_linear(randn(hidden, n_in) * n_in**-0.5, bias)
        w_next, w_gate = (linear.pack_linear(randn(n, hidden) * hidden**-0.5) for n in (200, 384))
        x, residual, weight = randn(n_rows, n_in), residual_of(n_rows, hidden), randn(hidden)
        for _ in range(2):  # the counters of the cuts are back at zero
            y = kernels.linear(x, w)
            want, want_residual = add_rms_norm(y.double(), residual.double(), weight.double(), EPS)
            got, got_residual = kernels.linear_add_rms_norm(x, w, residual.clone(), weight, EPS)
            assert isinstance(got, NormRows) == (n_rows <= MOST_ROWS)
            assert error(got_residual, want_residual) < 4e-3
            assert error(kernels.linear(got, w_next), want @ w_next.data.weight.double().T) < 8e-3
            gate, up = (want @ w_gate.data.weight.double().T).chunk(2, 1)
            assert error(kernels.gated_linear(got, w_gate), torch.nn.functional.silu(gate) * up) < 1.5e-2


@pytest.mark.parametrize("shape", FP8_SHAPES, ids=str)
def test_quantized_rows_are_as_close_to_the_exact_ones_as_those_of_the_ops_one_by_one(kernels, shape):
    """What they are rounded to differs, for one rounding to bf16 is left out: it is the distance to the exact product that counts. That of a
    single row is anything from 0.83 to 1.2 of the other way's by chance, so all rows of few count together."""
    torch.manual_seed(0)
    hidden, n_in = shape
    ops = kernels.quantized

    def packed(n_out: int, n_in: int, bias: torch.Tensor | None = None):
        w = reference.quantize_weight(randn(n_out, n_in).float() * n_in**-0.5)
        return fp8_linear.pack_fp8(w, bias), reference.dequantize(w, torch.float64)

    ours, theirs, wanted = [], [], []
    for n_rows in ROWS:
        w, _ = packed(hidden, n_in, randn(hidden) if n_rows % 2 else None)
        (w_next, next_values), (w_gate, gate_values) = packed(384, hidden), packed(512, hidden)
        x, residual, weight = randn(n_rows, n_in), residual_of(n_rows, hidden), randn(hidden)
        y = ops.linear(x, w)
        exact, _ = add_rms_norm(y.double(), residual.double(), weight.double(), EPS)
        apart, want_residual = ops.add_rms_norm(y, residual.clone(), weight, EPS)
        got, got_residual = ops.linear_add_rms_norm(x, w, residual.clone(), weight, EPS)
        assert isinstance(got, NormRows) == (n_rows <= MOST_ROWS)
        assert torch.equal(got_residual, want_residual)
        assert error(ops.linear(got, w_next), exact @ next_values.T) < 5e-2
        if n_rows <= MOST_ROWS:
            gate, up = (exact @ gate_values.T).chunk(2, 1)
            wanted += [exact @ next_values.T, torch.nn.functional.silu(gate) * up]
            ours += [ops.linear(got, w_next), values(ops.gated_linear(got, w_gate))]
            theirs += [ops.linear(apart, w_next), values(ops.gated_linear(apart, w_gate))]
    flat = [torch.cat([t.double().flatten() for t in each]) for each in (ours, theirs, wanted)]
    assert error(flat[0], flat[2]) < 1.1 * error(flat[1], flat[2])


def test_rows_in_bf16_of_a_product_in_fp8_are_those_of_the_ops_one_by_one(kernels):
    """What the output head takes."""
    w = fp8_linear.pack_fp8(reference.quantize_weight(randn(1024, 2048).float() * 2048**-0.5))
    head = linear.pack_linear(randn(200, 1024) * 1024**-0.5)
    for n_rows in ROWS:
        x, residual, weight = randn(n_rows, 2048), residual_of(n_rows, 1024), randn(1024)
        want, _ = kernels.add_rms_norm(kernels.linear(x, w), residual.clone(), weight, EPS)
        got, _ = kernels.linear_add_rms_norm(x, w, residual.clone(), weight, EPS)
        assert error(kernels.linear(got, head), kernels.linear(want, head)) < 8e-3
