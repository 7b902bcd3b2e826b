"""silu_mul: elementwise, one program per slice of a row."""

import triton
import triton.language as tl
from torch import Tensor

from kilat.ops.triton.launch import can_overlap, let_next_start, wait_for_previous

BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """Contract: ops/silu_mul.py. Batch-invariant: no reduction."""
    gate_up = gate_up.contiguous()
    n_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(n_rows, width)
    if n_rows == 0:
        return out
    pdl = can_overlap()
    grid = (n_rows, triton.cdiv(width, BLOCK))
    _silu_mul[grid](gate_up, out, width, BLOCK=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl)
    return out


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    wait_for_previous(PDL)
    gate = tl.load(gate_up_ptr + row * 2 * width + at, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * width + width + at, mask=inside, other=0.0)
    f = gate.to(tl.float32)
    silu = (f / (1.0 + tl.exp(-f))).to(gate.dtype)
    y = silu.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * width + at, y.to(gate.dtype), mask=inside)
