"""The product of linear for a few hundred rows: all steps along K of all tiles of y in one line, cut into equal shares, one per program.

A tile of y that two or more programs share goes through a workspace, and whoever finishes last adds its parts, in their order. So every
multiprocessor works to the end whatever the shape, where whole tiles would leave some idle in the last round.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kilat.ops.triton.launch import sm_count
from kilat.ops.triton.linear_stream import Tiles


def shared_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, done: Tensor, t: Tiles, *, gated: bool = False
) -> Tensor:
    """x [T, K], weight [N, K] -> [T, N]; with ``gated`` silu(first half of the outputs) * second half, [T, N / 2].

    ``done`` [tiles of y] int32 is zero before and after. ``t.cuts`` is not used: shares decide. Not batch-invariant.
    """
    n_in = weight.shape[1]
    n_out = weight.shape[0] // 2 if gated else weight.shape[0]
    x = x.contiguous()
    n_rows = x.shape[0]
    out = x.new_empty(n_rows, n_out)
    programs = sm_count()
    part = torch.empty(
        programs * 2, (2 if gated else 1) * t.outputs * t.rows, dtype=torch.float32, device=x.device
    )
    w_layout = gl.NVMMASharedLayout.get_default_for([t.outputs, t.inner], gl.bfloat16)
    x_layout = gl.NVMMASharedLayout.get_default_for([t.rows, t.inner], gl.bfloat16)
    _shares[(programs,)](
        TensorDescriptor.from_tensor(weight, [t.outputs, t.inner], w_layout),
        TensorDescriptor.from_tensor(x, [t.rows, t.inner], x_layout),
        bias, out, part, done, n_rows, n_out, n_in,
        OUTPUTS=t.outputs, ROWS=t.rows, INNER=t.inner, STAGES=t.stages, GATED=gated, WARPS=t.warps, num_warps=t.warps,
        launch_pdl=True,
    )  # fmt: skip
    return out


@gluon.jit
def _load_w(
    w_desc,
    tile,
    k,
    n_out,
    n_blocks,
    full,
    w_slot,
    up_slot,
    OUTPUTS: gl.constexpr,
    INNER: gl.constexpr,
    GATED: gl.constexpr,
    fill,
):
    n = tile // n_blocks * OUTPUTS
    tma.async_copy_global_to_shared(w_desc, [n, k * INNER], full, w_slot, pred=fill)
    if GATED:
        tma.async_copy_global_to_shared(w_desc, [n_out + n, k * INNER], full, up_slot, pred=fill)


@gluon.jit
def _finish(
    acc, acc_up, tile, begin, segment, steps, share, n_blocks, out_ptr, bias_ptr, part_ptr, done_ptr, n_rows, n_out,
    OUTPUTS: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr, WARPS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """A program has done what it owns of a tile, from place ``segment`` of the line on: write y, or its part, or add all parts."""
    SIZE: gl.constexpr = OUTPUTS * ROWS
    SLOT: gl.constexpr = SIZE * (2 if GATED else 1)
    n_local = gl.arange(0, OUTPUTS, gl.SliceLayout(1, mma))
    r_local = gl.arange(0, ROWS, gl.SliceLayout(0, mma))
    origin = tile * steps
    first, last = origin // share, (origin + steps - 1) // share
    whole = first == last
    if first < last:
        inner = n_local[:, None] * ROWS + r_local[None, :]
        mine = part_ptr + (gl.program_id(0) * 2 + (segment > begin).to(gl.int32)) * SLOT
        gl.store(mine + inner, acc)
        if GATED:
            gl.store(mine + SIZE + inner, acc_up)
        gl.thread_barrier()
        whole = gl.atomic_add(done_ptr + tile, 1, sem="acq_rel", scope="gpu") == last - first
        if whole:
            gl.store(done_ptr + tile, 0)
            acc = gl.zeros((OUTPUTS, ROWS), gl.float32, mma)
            acc_up = acc
            for p in range(first, last + 1):
                # the first part lies at its program's end, unless that program begins with the tile
                theirs = part_ptr + (p * 2 + ((p == first) & (origin > p * share)).to(gl.int32)) * SLOT
                acc += gl.load(theirs + inner, cache_modifier=".cg")
                if GATED:
                    acc_up += gl.load(theirs + SIZE + inner, cache_modifier=".cg")
    if whole:
        kind: gl.constexpr = out_ptr.dtype.element_ty
        flat: gl.constexpr = gl.BlockedLayout([8, 1], [OUTPUTS // 8, 256 // OUTPUTS], [1, WARPS], [0, 1])
        n = tile // n_blocks * OUTPUTS + n_local
        if bias_ptr is not None:
            acc += gl.load(bias_ptr + n, mask=n < n_out, other=0.0).to(gl.float32)[:, None]
            if GATED:
                acc_up += gl.load(bias_ptr + n_out + n, mask=n < n_out, other=0.0).to(gl.float32)[:, None]
        if GATED:
            acc = acc.to(kind).to(gl.float32)
            acc = (acc / (1.0 + gl.exp(-acc))).to(kind).to(gl.float32) * acc_up.to(kind).to(gl.float32)
        y = gl.convert_layout(acc.to(kind), flat)
        n = tile // n_blocks * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(1, flat))
        r = tile % n_blocks * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, flat))
        gl.store(
            out_ptr + r[None, :].to(gl.int64) * n_out + n[:, None],
            y,
            mask=(n[:, None] < n_out) & (r[None, :] < n_rows),
        )


@gluon.jit(do_not_specialize=["n_rows"])
def _shares(
    w_desc, x_desc, bias_ptr, out_ptr, part_ptr, done_ptr, n_rows, n_out, n_in,
    OUTPUTS: gl.constexpr, ROWS: gl.constexpr, INNER: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    BYTES: gl.constexpr = ((2 if GATED else 1) * OUTPUTS + ROWS) * INNER * 2
    steps = gl.cdiv(n_in, INNER)
    # consecutive tiles are blocks of rows of the same outputs: they share a tile of the weight
    n_blocks = gl.cdiv(n_rows, ROWS)
    line = gl.cdiv(n_out, OUTPUTS) * n_blocks * steps
    share = gl.cdiv(line, gl.num_programs(0))
    begin = gl.program_id(0) * share
    end = gl.minimum(begin + share, line)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, OUTPUTS, INNER], w_desc.layout)
    up_ring = w_ring
    if GATED:
        up_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, OUTPUTS, INNER], w_desc.layout)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, INNER], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(STAGES):
        mbarrier.init(full.index(j), count=1)
    for j in gl.static_range(STAGES):
        fill = begin + j < end
        mbarrier.expect(full.index(j), BYTES, pred=fill)
        _load_w(
            w_desc, (begin + j) // steps, (begin + j) % steps, n_out, n_blocks, full.index(j), w_ring.index(j), up_ring.index(j),
            OUTPUTS, INNER, GATED, fill,
        )  # fmt: skip
    gdc_wait()
    for j in gl.static_range(STAGES):
        at = [(begin + j) // steps % n_blocks * ROWS, (begin + j) % steps * INNER]
        tma.async_copy_global_to_shared(x_desc, at, full.index(j), x_ring.index(j), pred=begin + j < end)

    ACROSS: gl.constexpr = 2 if OUTPUTS < 16 * WARPS else 1
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS // ACROSS, ACROSS], [16, ROWS // ACROSS, 16])
    ahead_tile, ahead_k = (begin + STAGES - 1) // steps, (begin + STAGES - 1) % steps
    segment = begin
    while segment < end:
        tile = segment // steps
        stop = gl.minimum((tile + 1) * steps, end)
        acc = gl.zeros((OUTPUTS, ROWS), gl.float32, mma)
        acc_up = acc
        for i in range(segment, stop):
            s = (i - begin) % STAGES
            mbarrier.wait(full.index(s), (i - begin) // STAGES & 1)
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
            fill = (i > begin) & (i + STAGES - 1 < end)
            mbarrier.expect(full.index(old), BYTES, pred=fill)
            _load_w(
                w_desc, ahead_tile, ahead_k, n_out, n_blocks, full.index(old), w_ring.index(old), up_ring.index(old),
                OUTPUTS, INNER, GATED, fill,
            )  # fmt: skip
            at = [ahead_tile % n_blocks * ROWS, ahead_k * INNER]
            tma.async_copy_global_to_shared(x_desc, at, full.index(old), x_ring.index(old), pred=fill)
            ahead_k += 1
            if ahead_k == steps:
                ahead_k = 0
                ahead_tile += 1
        if GATED:
            acc, acc_up = warpgroup_mma_wait(0, deps=(acc, acc_up))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        _finish(
            acc, acc_up, tile, begin, segment, steps, share, n_blocks, out_ptr, bias_ptr, part_ptr, done_ptr, n_rows, n_out,
            OUTPUTS, ROWS, GATED, WARPS, mma,
        )  # fmt: skip
        segment = stop
