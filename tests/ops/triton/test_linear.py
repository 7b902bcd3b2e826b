"""The streaming product against fp64, for all cuts and row counts, and bitwise independence of the number of rows."""

import pytest
import torch

from kilat.ops.triton.linear import Tiles, linear, pack_linear, stream
from tests.ops.triton.steps import error

LIMIT = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def _case(n_rows, n_out, n_in, device, dtype, *, bias=True):
    x = torch.randn(n_rows, n_in).to(device, dtype)
    weight = torch.randn(n_out, n_in).to(device, dtype)
    b = torch.randn(n_out).to(device, dtype) if bias else None
    exact = x.double() @ weight.double().T + (b.double() if b is not None else 0)
    return x, pack_linear(weight, b), exact


@pytest.mark.parametrize("cuts", [1, 2, 3])
@pytest.mark.parametrize("n_rows", [1, 5, 16, 33])
def test_stream_equals_the_exact_product(device, half, n_rows, cuts):
    for bias in (True, False):
        x, w, exact = _case(n_rows, 200, 448, device, half, bias=bias)
        tiles = Tiles(outputs=64, rows=16, inner=64, stages=3, warps=4, cuts=cuts, ahead=0)
        assert error(stream(x, w, tiles), exact) < LIMIT[x.dtype]
        # the counters of the cuts are back at zero: the next call is right too
        assert error(stream(x, w, tiles), exact) < LIMIT[x.dtype]
