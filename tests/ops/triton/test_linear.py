"""The linear kernels against fp64 at every row bucket, the gate fused with it, and bitwise independence of the number of rows."""

import pytest
import torch

from kilat.ops.triton import linear as ops
from kilat.ops.triton.silu_mul import silu_mul
from tests.ops.triton.steps import error

pytestmark = pytest.mark.gpu
ROWS = [1, 3, 8, 9, 17, 40, 64, 65, 128, 200, 256, 300]
# (outputs, K): a small one, tails in outputs and in K, cuts in K, many outputs
SHAPES = [(192, 256), (200, 968), (1024, 8192), (16500, 512)]


def _case(n_rows, n_out, n_in, *, bias=False):
    x = torch.randn(n_rows, n_in, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(n_out, n_in, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n_out, device="cuda", dtype=torch.bfloat16) if bias else None
    exact = x.double() @ weight.double().T + (b.double() if b is not None else 0)
    return x, ops.pack_linear(weight, b), exact


@pytest.mark.parametrize("run", [ops.linear, ops.linear_exact])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_equals_the_exact_product(shape, run):
    for n_rows in ROWS:
        x, w, exact = _case(n_rows, *shape, bias=n_rows % 2 == 1)
        assert error(run(x, w), exact) < 3e-3
        # the counters of the cuts are back at zero: the next call is right too
        assert error(run(x, w), exact) < 3e-3


@pytest.mark.parametrize("run", [ops.gated_linear, ops.gated_linear_exact])
@pytest.mark.parametrize("shape", [(384, 256), (2200, 968)], ids=str)
def test_fused_gate_equals_gate_of_the_exact_product(shape, run):
    for n_rows in ROWS:
        x, w, exact = _case(n_rows, *shape, bias=n_rows % 2 == 1)
        x *= shape[1] ** -0.5
        exact = x.double() @ w.data.weight.double().T + (w.bias.double() if w.bias is not None else 0)
        gate, up = exact.chunk(2, -1)
        assert error(run(x, w), torch.nn.functional.silu(gate) * up) < 6e-3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact_linear_gives_a_row_the_same_bits_in_any_batch(shape):
    x, w, _ = _case(300, *shape, bias=True)
    alone = torch.cat([ops.linear_exact(x[i : i + 1], w) for i in range(20)])
    for n_rows in ROWS:
        got = ops.linear_exact(x[:n_rows], w)
        assert torch.equal(got[:20], alone[:n_rows])
        assert torch.equal(got, ops.linear_exact(x, w)[:n_rows])


def test_exact_gate_has_the_bits_of_its_parts():
    x, w, _ = _case(300, 2200, 968)
    for n_rows in ROWS:
        expected = silu_mul(ops.linear_exact(x, w))[:n_rows]
        assert torch.equal(ops.gated_linear_exact(x[:n_rows], w), expected)
