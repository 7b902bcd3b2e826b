"""The streaming product of FP8 weights for few rows: linear_stream with e4m3 on both sides and fp32 scales.

y^T [N, T] = W [N, K] x^T [K, T] in steps of one group of 128 along K: the matrix units sum a group, then its sum is scaled by the weight
block's scale and the rows' scales and added in fp32. So the order of the sum is the same for every tile size.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kilat.ops.fp8_linear import BLOCK
from kilat.ops.triton.fp8_rows import Fp8Rows, empty_rows
from kilat.ops.triton.linear_stream import Tiles
from kilat.ops.triton.norm_rows import PLAIN, End
from kilat.ops.triton.stream_end import add_cuts, bias_and_gate, into_residual, square_parts


def stream_fp8(
    x: Fp8Rows, weight: Tensor, w_scale: Tensor, bias: Tensor | None, done: Tensor, t: Tiles, end: End = PLAIN
) -> Tensor | Fp8Rows:
    """x [T, K], weight [N, K] e4m3, w_scale [ceil(N / 128), ceil(K / 128)] -> [T, N] bf16, or [T, N / 2] with a gate; quantized with tiles of
    128 outputs. ``done`` as in linear_stream. Batch-invariant for equal ``cuts``.
    """
    assert t.inner % BLOCK == 0 and BLOCK % t.outputs == 0
    n_in = weight.shape[1]
    n_out = weight.shape[0] // 2 if end.gate else weight.shape[0]
    n_rows = x.n_rows
    rows_out = empty_rows(n_rows, n_out, x.data.device) if end.quantize else None
    out = (
        rows_out.data if rows_out else torch.empty(n_rows, n_out, dtype=torch.bfloat16, device=x.data.device)
    )
    part = x.scale
    if t.cuts > 1:
        part = torch.empty(
            t.cuts, 2 if end.gate else 1, n_rows, n_out, dtype=torch.float32, device=x.data.device
        )
    w_layout = gl.NVMMASharedLayout.get_default_for([t.outputs, BLOCK], gl.float8e4nv)
    x_layout = gl.NVMMASharedLayout.get_default_for([t.rows, BLOCK], gl.float8e4nv)
    grid = (triton.cdiv(n_out, t.outputs), t.cuts, triton.cdiv(n_rows, t.rows))
    _stream_fp8[grid](
        TensorDescriptor.from_tensor(weight, [t.outputs, BLOCK], w_layout),
        TensorDescriptor.from_tensor(x.data, [t.rows, BLOCK], x_layout),
        w_scale, x.scale, bias, out, rows_out.scale if rows_out else None, part, done,
        n_rows, n_out, n_in, w_scale.stride(0), x.scale.stride(0), rows_out.scale.stride(0) if rows_out else 0,
        *end.arguments,
        OUTPUTS=t.outputs, ROWS=t.rows, GROUPS=t.inner // BLOCK, CUTS=t.cuts, STAGES=t.stages, GATED=end.gate, WARPS=t.warps,
        SQUARES=end.squares,
        num_warps=t.warps, launch_pdl=True,
    )  # fmt: skip
    return rows_out or out


@gluon.jit
def _product(left, right, zero):
    return warpgroup_mma(left, right, zero, use_acc=False, max_num_imprecise_acc=128, is_async=True)


@gluon.jit
def _wait(outstanding: gl.constexpr, parts):
    """``parts`` when all but ``outstanding`` products are done."""
    if len(parts) == 1:
        parts = (warpgroup_mma_wait(outstanding, deps=parts),)
    else:
        parts = warpgroup_mma_wait(outstanding, deps=parts)
    return parts


@gluon.jit
def _scales(
    x_scale_ptr, w_scales, u_scales, x_stride, row, n_rows, step, groups, GROUPS: gl.constexpr, GATED: gl.constexpr
):  # fmt: skip
    """Of each group of a step: the rows' scales, the weight block's, and that of the ups; 0 past the last group."""
    x = ()
    w = ()
    u = ()
    for g in gl.static_range(GROUPS):
        k = step * GROUPS + g
        x += (gl.load(x_scale_ptr + k * x_stride + row, mask=(row < n_rows) & (k < groups), other=0.0),)  # type: ignore[assignment]
        w += (gl.load(w_scales + k, mask=k < groups, other=0.0),)  # type: ignore[assignment]
        if GATED:
            u += (gl.load(u_scales + k, mask=k < groups, other=0.0),)  # type: ignore[assignment]
    return x, w, u


@gluon.jit(do_not_specialize=["n_rows", "x_stride", "out_stride", "n_squares", "eps"])
def _stream_fp8(
    w_desc, x_desc, w_scale_ptr, x_scale_ptr, bias_ptr, out_ptr, out_scale_ptr, part_ptr, done_ptr,
    n_rows, n_out, n_in, w_stride, x_stride, out_stride, residual_ptr, norm_ptr, square_ptr, n_squares, eps,
    OUTPUTS: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, CUTS: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, WARPS: gl.constexpr, SQUARES: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    INNER: gl.constexpr = GROUPS * 128
    BYTES: gl.constexpr = ((2 if GATED else 1) * OUTPUTS + ROWS) * INNER
    tile, cut, block = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    groups = gl.cdiv(n_in, 128)
    steps = gl.cdiv(n_in, INNER)
    first, last = steps * cut // CUTS, steps * (cut + 1) // CUTS
    w_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * GROUPS, OUTPUTS, 128], w_desc.layout)
    up_ring = w_ring
    if GATED:
        up_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * GROUPS, OUTPUTS, 128], w_desc.layout)
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * GROUPS, ROWS, 128], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(STAGES):
        mbarrier.init(full.index(j), count=1)
    for j in gl.static_range(STAGES):
        fill = first + j < last
        mbarrier.expect(full.index(j), BYTES, pred=fill)
        for g in gl.static_range(GROUPS):
            at = (first + j) * INNER + g * 128
            place = j * GROUPS + g
            tma.async_copy_global_to_shared(
                w_desc, [tile * OUTPUTS, at], full.index(j), w_ring.index(place), pred=fill
            )
            if GATED:
                tma.async_copy_global_to_shared(
                    w_desc, [n_out + tile * OUTPUTS, at], full.index(j), up_ring.index(place), pred=fill
                )
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0],
        [WARPS // (2 if OUTPUTS < 16 * WARPS else 1), 2 if OUTPUTS < 16 * WARPS else 1],
        [16, min(ROWS // (2 if OUTPUTS < 16 * WARPS else 1), 256), 32],
    )
    row = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, mma))
    w_scales = w_scale_ptr + tile * OUTPUTS // 128 * w_stride
    u_scales = w_scale_ptr + (n_out + tile * OUTPUTS) // 128 * w_stride
    gdc_wait()
    for j in gl.static_range(STAGES):
        fill = first + j < last
        for g in gl.static_range(GROUPS):
            tma.async_copy_global_to_shared(
                x_desc, [block * ROWS, (first + j) * INNER + g * 128], full.index(j), x_ring.index(j * GROUPS + g),
                pred=fill,
            )  # fmt: skip
    flat: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, WARPS], [0, 1])
    r = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, flat))
    if SQUARES > 0:
        squares = square_parts(square_ptr, r, n_rows, n_squares, SQUARES, flat)
    acc = gl.zeros((OUTPUTS, ROWS), gl.float32, mma)
    acc_up = gl.zeros((OUTPUTS, ROWS), gl.float32, mma)
    zero = gl.zeros((OUTPUTS, ROWS), gl.float32, mma)
    x_now, w_now, u_now = _scales(
        x_scale_ptr, w_scales, u_scales, x_stride, row, n_rows, first, groups, GROUPS, GATED
    )
    for i in range(first, last):
        s = (i - first) % STAGES
        # scales are asked for a step ahead: the way from L2 takes as long as a step
        x_next, w_next, u_next = _scales(
            x_scale_ptr, w_scales, u_scales, x_stride, row, n_rows, i + 1, groups, GROUPS, GATED
        )
        mbarrier.wait(full.index(s), (i - first) // STAGES & 1)
        # all groups of the stage are on their way before the first is waited for: the matrix units go on while sums are scaled
        parts = ()
        for g in gl.static_range(GROUPS):
            right = x_ring.index(s * GROUPS + g).permute((1, 0))
            parts += (_product(w_ring.index(s * GROUPS + g), right, zero),)  # type: ignore[assignment]
            if GATED:
                parts += (_product(up_ring.index(s * GROUPS + g), right, zero),)  # type: ignore[assignment]
        for g in gl.static_range(GROUPS):
            if GATED:
                parts = _wait(2 * (GROUPS - 1 - g), parts)
                acc += parts[2 * g] * (x_now[g] * w_now[g])[None, :]
                acc_up += parts[2 * g + 1] * (x_now[g] * u_now[g])[None, :]
            else:
                parts = _wait(GROUPS - 1 - g, parts)
                acc += parts[g] * (x_now[g] * w_now[g])[None, :]
        x_now, w_now, u_now = x_next, w_next, u_next
        # all warps are done with this place of the ring
        gl.thread_barrier()
        fill = i + STAGES < last
        mbarrier.expect(full.index(s), BYTES, pred=fill)
        for g in gl.static_range(GROUPS):
            at = (i + STAGES) * INNER + g * 128
            place = s * GROUPS + g
            tma.async_copy_global_to_shared(
                w_desc, [tile * OUTPUTS, at], full.index(s), w_ring.index(place), pred=fill
            )
            if GATED:
                tma.async_copy_global_to_shared(
                    w_desc, [n_out + tile * OUTPUTS, at], full.index(s), up_ring.index(place), pred=fill
                )
            tma.async_copy_global_to_shared(
                x_desc, [block * ROWS, at], full.index(s), x_ring.index(place), pred=fill
            )
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
        kind: gl.constexpr = gl.bfloat16
        if SQUARES > 0:
            factor = gl.rsqrt(gl.sum(squares, 0) / n_in + eps)[None, :]
            y *= factor
            up *= factor
        y = bias_and_gate(y, up, bias_ptr, n, n_out, kind, GATED)
        if residual_ptr is not None:
            y = into_residual(
                y, residual_ptr, norm_ptr, square_ptr, tile, at, n, r, inside, n_rows, n_out, kind
            )
        if out_scale_ptr is not None:
            # outputs of this tile are one group of the next product's input
            y = gl.where(inside, y.to(kind).to(gl.float32), 0.0)
            top = gl.max(gl.abs(y), 0)
            scale = gl.maximum(gl.div_rn(top, gl.full_like(top, 448.0)), 1.1754943508222875e-38)
            gl.store(out_scale_ptr + tile * out_stride + r, scale, mask=r < n_rows)
            gl.store(
                out_ptr + at, gl.div_rn(y, scale[None, :] + gl.zeros_like(y)).to(gl.float8e4nv), mask=inside
            )
        else:
            gl.store(out_ptr + at, y.to(kind), mask=inside)
