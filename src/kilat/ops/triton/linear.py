"""linear: for few rows the weight streams through TMA into the matrix units as their tall operand; for many rows cuBLAS.

The weight is the left operand, the rows of x are the right one: y^T [N, T] = W [N, K] x^T [K, T]. So a matrix instruction that is 64 high
works on 64 outputs and only 8 .. 256 rows wide, and one row costs no more than the stream of the weights.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kilat.ops.linear import LinearWeight
from kilat.ops.triton.launch import can_overlap, let_next_start, prefetch_l2, wait_for_previous

STREAM_ROWS = 64
"""Up to this many rows our kernel is used."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shape of one program: ``outputs`` x ``rows`` of y, ``inner`` of K at a time, ``stages`` in flight, K cut into ``cuts``."""

    outputs: int
    rows: int
    inner: int
    stages: int
    warps: int
    cuts: int
    ahead: int


@dataclass(frozen=True, slots=True)
class Packed:
    """The weight [N, K] as loaded, and the counters of the cuts that are done, one per tile of y; zero between calls."""

    weight: Tensor
    done: Tensor


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
    """Contract: ops/linear.py. Keeps the tensor; a call of ``linear`` may not run beside another on the same weight."""
    weight = weight.contiguous()
    n_out, n_in = weight.shape
    done = torch.zeros(triton.cdiv(n_out, 64) * 4, dtype=torch.int32, device=weight.device)
    n_bytes = weight.numel() * weight.element_size()
    return LinearWeight(Packed(weight, done), (n_out, n_in), weight.dtype, bias, n_bytes)


def linear(x: Tensor, w: LinearWeight) -> Tensor:
    """Contract: ops/linear.py. Not batch-invariant: the number of rows decides between our kernel and cuBLAS."""
    packed: Packed = w.data
    n_out, n_in = w.shape
    if not 0 < x.shape[0] <= STREAM_ROWS or w.dtype != torch.bfloat16 or n_in % 64:
        return F.linear(x, packed.weight, w.bias)
    return stream(x, w, tiles_for(x.shape[0], n_out, n_in))


def tiles_for(n_rows: int, n_out: int, n_in: int) -> Tiles:
    """Measured on H200."""
    rows = max(8, triton.next_power_of_2(n_rows))
    outputs = 128 if n_out >= 16384 else 64
    cuts = 2 if n_out <= 4096 else 1
    return Tiles(outputs, rows, 128 if rows <= 32 else 64, 4, 4, cuts, 0)


def stream(x: Tensor, w: LinearWeight, t: Tiles) -> Tensor:
    """y = x W^T + b by the streaming kernel, any number of rows. Batch-invariant for fixed inner and cuts."""
    packed: Packed = w.data
    n_out, n_in = w.shape
    x = x.contiguous()
    n_rows = x.shape[0]
    out = x.new_empty(n_rows, n_out)
    grid = (triton.cdiv(n_out, t.outputs), t.cuts, triton.cdiv(n_rows, t.rows))
    part = torch.empty(t.cuts, n_rows, n_out, dtype=torch.float32, device=x.device) if t.cuts > 1 else None
    pdl = can_overlap()
    _stream[grid](
        TensorDescriptor.from_tensor(packed.weight, [t.outputs, t.inner]),
        TensorDescriptor.from_tensor(x, [t.rows, t.inner]),
        packed.weight, w.bias, out, part, packed.done, n_rows, n_out, n_in,
        OUTPUTS=t.outputs, ROWS=t.rows, INNER=t.inner, CUTS=t.cuts, STAGES=t.stages, AHEAD=t.ahead, PDL=pdl,
        num_warps=t.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["n_rows"])
def _stream(
    w_desc, x_desc, w_ptr, bias_ptr, out_ptr, part_ptr, done_ptr, n_rows, n_out, n_in,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, CUTS: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    tile, cut, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    steps = tl.cdiv(n_in, INNER)
    first, last = steps * cut // CUTS, steps * (cut + 1) // CUTS
    if AHEAD > 0:
        if PDL:
            n_bytes = tl.minimum(AHEAD, (last - first) * INNER * 2)
            inside = tl.minimum(n, n_out - 1).to(tl.int64)
            prefetch_l2(w_ptr + inside * n_in + first * INNER, n_bytes)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n, mask=n < n_out, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for i in tl.range(first, last, num_stages=STAGES):
        w = w_desc.load([tile * OUTPUTS, i * INNER])
        x = x_desc.load([block * ROWS, i * INNER])
        acc = tl.dot(w, x.T, acc)
    y = acc.T
    r = block * ROWS + tl.arange(0, ROWS)
    inside = (r[:, None] < n_rows) & (n[None, :] < n_out)
    at = r[:, None].to(tl.int64) * n_out + n[None, :]
    if CUTS > 1:
        size = tl.cast(n_rows, tl.int64) * n_out
        tl.store(part_ptr + cut * size + at, y, mask=inside)
        tl.debug_barrier()
        mine = done_ptr + block * tl.num_programs(0) + tile
        order = tl.atomic_add(mine, 1, sem="acq_rel", scope="gpu")
        if order == CUTS - 1:
            # the last of the cuts adds them all, in their order
            tl.atomic_xchg(mine, 0, sem="relaxed")
            y = tl.load(part_ptr + at, mask=inside, other=0.0, cache_modifier=".cg")
            for c in tl.static_range(1, CUTS):
                y += tl.load(part_ptr + c * size + at, mask=inside, other=0.0, cache_modifier=".cg")
            _finish(out_ptr, bias_ptr, bias if bias_ptr is not None else 0.0, y, at, inside)
    else:
        _finish(out_ptr, bias_ptr, bias if bias_ptr is not None else 0.0, y, at, inside)


@triton.jit
def _finish(out_ptr, bias_ptr, bias, y, at, inside):
    if bias_ptr is not None:
        y += bias[None, :]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)
