"""The streaming product of linear, for few rows: weights flow through shared memory into the matrix units, which take them as left operand.

y^T [N, T] = W [N, K] x^T [K, T]: a matrix instruction is 64 outputs high and 8 .. 256 rows wide, so one row costs no more than reading the
weight. Each program fills its ring of weight tiles before it waits for the kernel that computes x: the memory stays busy across kernels.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kilat.ops.triton.norm_rows import PLAIN, End
from kilat.ops.triton.stream_end import add_cuts, bias_and_gate, into_residual, square_parts


@dataclass(frozen=True, slots=True)
class Tiles:
    """One program computes ``outputs`` x ``rows`` of y over a ``1 / cuts`` share of K, ``inner`` of K at a time, ``stages`` in flight."""

    outputs: int
    rows: int
    inner: int
    stages: int
    warps: int
    cuts: int


def stream(
    x: Tensor, weight: Tensor, bias: Tensor | None, done: Tensor, t: Tiles, end: End = PLAIN
) -> Tensor:
    """x [T, K], weight [N, K] -> [T, N], or [T, N / 2] with a gate.

    ``done`` [tiles of y] int32, zero before and after: counts the finished cuts. Batch-invariant for equal ``inner`` and ``cuts``.
    """
    n_in = weight.shape[1]
    n_out = weight.shape[0] // 2 if end.gate else weight.shape[0]
    x = x.contiguous()
    n_rows = x.shape[0]
    out = x.new_empty(n_rows, n_out)
    part = x
    if t.cuts > 1:
        part = torch.empty(t.cuts, 2 if end.gate else 1, n_rows, n_out, dtype=torch.float32, device=x.device)
    w_layout = gl.NVMMASharedLayout.get_default_for([t.outputs, t.inner], gl.bfloat16)
    x_layout = gl.NVMMASharedLayout.get_default_for([t.rows, t.inner], gl.bfloat16)
    grid = (triton.cdiv(n_out, t.outputs), t.cuts, triton.cdiv(n_rows, t.rows))
    _stream[grid](
        TensorDescriptor.from_tensor(weight, [t.outputs, t.inner], w_layout),
        TensorDescriptor.from_tensor(x, [t.rows, t.inner], x_layout),
        bias, out, part, done, n_rows, n_out, n_in, *end.arguments,
        OUTPUTS=t.outputs, ROWS=t.rows, INNER=t.inner, CUTS=t.cuts, STAGES=t.stages, GATED=end.gate, WARPS=t.warps,
        SQUARES=end.squares,
        num_warps=t.warps, launch_pdl=True,
    )  # fmt: skip
    return out


@gluon.jit(do_not_specialize=["n_rows", "n_squares", "eps"])
def _stream(
    w_desc, x_desc, bias_ptr, out_ptr, part_ptr, done_ptr, n_rows, n_out, n_in,
    residual_ptr, norm_ptr, square_ptr, n_squares, eps,
    OUTPUTS: gl.constexpr, ROWS: gl.constexpr, INNER: gl.constexpr, CUTS: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, WARPS: gl.constexpr, SQUARES: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    BYTES: gl.constexpr = ((2 if GATED else 1) * OUTPUTS + ROWS) * INNER * 2
    tile, cut, block = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    steps = gl.cdiv(n_in, INNER)
    first, last = steps * cut // CUTS, steps * (cut + 1) // CUTS
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, OUTPUTS, INNER], w_desc.layout)
    up_ring = w_ring
    if GATED:
        up_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, OUTPUTS, INNER], w_desc.layout)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, INNER], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(STAGES):
        mbarrier.init(full.index(j), count=1)
    for j in gl.static_range(STAGES):
        fill = first + j < last
        mbarrier.expect(full.index(j), BYTES, pred=fill)
        at = (first + j) * INNER
        tma.async_copy_global_to_shared(
            w_desc, [tile * OUTPUTS, at], full.index(j), w_ring.index(j), pred=fill
        )
        if GATED:
            tma.async_copy_global_to_shared(
                w_desc, [n_out + tile * OUTPUTS, at], full.index(j), up_ring.index(j), pred=fill
            )
    gdc_wait()
    for j in gl.static_range(STAGES):
        fill = first + j < last
        tma.async_copy_global_to_shared(
            x_desc, [block * ROWS, (first + j) * INNER], full.index(j), x_ring.index(j), pred=fill
        )

    flat: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, WARPS], [0, 1])
    r = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, flat))
    if SQUARES > 0:
        squares = square_parts(square_ptr, r, n_rows, n_squares, SQUARES, flat)
    ACROSS: gl.constexpr = 2 if OUTPUTS < 16 * WARPS else 1
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS // ACROSS, ACROSS], [16, min(ROWS // ACROSS, 256), 16]
    )
    acc = gl.zeros((OUTPUTS, ROWS), gl.float32, mma)
    acc_up = gl.zeros((OUTPUTS, ROWS), gl.float32, mma)
    for i in range(first, last):
        s = (i - first) % STAGES
        mbarrier.wait(full.index(s), (i - first) // STAGES & 1)
        right = x_ring.index(s).permute((1, 0))
        acc = warpgroup_mma(w_ring.index(s), right, acc, is_async=True)
        if GATED:
            acc_up = warpgroup_mma(up_ring.index(s), right, acc_up, is_async=True)
            acc, acc_up = warpgroup_mma_wait(2, deps=(acc, acc_up))
        else:
            acc = warpgroup_mma_wait(1, deps=(acc,))
        # the products of the step before are done: its place in the ring is free for all warps
        gl.thread_barrier()
        old = (s + STAGES - 1) % STAGES
        fill = (i > first) & (i + STAGES - 1 < last)
        at = (i + STAGES - 1) * INNER
        mbarrier.expect(full.index(old), BYTES, pred=fill)
        tma.async_copy_global_to_shared(
            w_desc, [tile * OUTPUTS, at], full.index(old), w_ring.index(old), pred=fill
        )
        if GATED:
            tma.async_copy_global_to_shared(
                w_desc, [n_out + tile * OUTPUTS, at], full.index(old), up_ring.index(old), pred=fill
            )
        tma.async_copy_global_to_shared(
            x_desc, [block * ROWS, at], full.index(old), x_ring.index(old), pred=fill
        )
    if GATED:
        acc, acc_up = warpgroup_mma_wait(0, deps=(acc, acc_up))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    # the layout changes below reuse the ring's memory, which other warps' last products may still read
    gl.thread_barrier()

    n = tile * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(1, flat))
    inside = (n[:, None] < n_out) & (r[None, :] < n_rows)
    at = r[None, :].to(gl.int64) * n_out + n[:, None]
    y = gl.convert_layout(acc, flat)
    up = y
    if GATED:
        up = gl.convert_layout(acc_up, flat)
    last_cut = True
    if CUTS > 1:
        mine = done_ptr + block * gl.num_programs(0) + tile
        size = gl.cast(n_rows, gl.int64) * n_out
        y, up, last_cut = add_cuts(y, up, part_ptr, mine, cut, at, inside, size, CUTS, GATED)
    if last_cut:
        kind: gl.constexpr = out_ptr.dtype.element_ty
        if SQUARES > 0:
            factor = gl.rsqrt(gl.sum(squares, 0) / n_in + eps)[None, :]
            y *= factor
            up *= factor
        y = bias_and_gate(y, up, bias_ptr, n, n_out, kind, GATED)
        if residual_ptr is not None:
            y = into_residual(
                y, residual_ptr, norm_ptr, square_ptr, tile, at, n, r, inside, n_rows, n_out, kind
            )
        gl.store(out_ptr + at, y.to(kind), mask=inside)
