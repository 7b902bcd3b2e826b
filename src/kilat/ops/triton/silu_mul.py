"""silu_mul: elementwise, one program per slice of a row."""

import triton
import triton.language as tl
from torch import Tensor

from kilat.ops.triton.fp8_rows import Fp8Rows, empty_rows, store_rows
from kilat.ops.triton.launch import can_overlap, let_next_start, wait_for_previous

BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """Contract: ops/silu_mul.py. Batch-invariant: no reduction."""
    gate_up = gate_up.contiguous()
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _launch(gate_up, out, None)
    return out


def silu_mul_fp8(gate_up: Tensor) -> Fp8Rows:
    """quantize_rows(silu_mul(gate_up)), to the bit."""
    gate_up = gate_up.contiguous()
    out = empty_rows(gate_up.shape[0], gate_up.shape[1] // 2, gate_up.device)
    _launch(gate_up, out.data[: out.n_rows], out.scale)
    return out


def _launch(gate_up: Tensor, out: Tensor, scale: Tensor | None) -> None:
    n_rows, width = out.shape
    if n_rows == 0:
        return
    pdl = can_overlap()
    grid = (n_rows, triton.cdiv(width, BLOCK))
    stride = 0 if scale is None else scale.stride(0)
    _silu_mul[grid](gate_up, out, scale, stride, width, BLOCK=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl)


@triton.jit(do_not_specialize=["scale_stride"])
def _silu_mul(gate_up_ptr, out_ptr, scale_ptr, scale_stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
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
    if scale_ptr is not None:
        first = tl.program_id(1) * (BLOCK // 128)
        store_rows(y.to(gate.dtype), out_ptr, scale_ptr, row, first, width, scale_stride, BLOCK // 128)
    else:
        tl.store(out_ptr + row * width + at, y.to(gate.dtype), mask=inside)
