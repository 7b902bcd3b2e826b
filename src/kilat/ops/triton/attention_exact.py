"""Batch-invariant attention of rows with few tokens: keys cut at multiples of EXACT_CUT, every cut a unit of work, the last one merges all.

The list of units is never stored: each program counts the units of all rows from kv_len and takes every n-th one, so the grid depends on
host-known bounds only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kilat.ops.triton.attention_call import LOG2E, Call
from kilat.ops.triton.attention_tiles import EXACT_CUT, attend, head_scale, load_part, merge, pages
from kilat.ops.triton.launch import can_overlap, let_next_start, sm_count, wait_for_previous

TILE = 64
STAGES = 3
PROGRAMS_PER_SM = 2


def decode_rows_exact(call: Call, done: Tensor) -> None:
    """Writes ``call.out`` for every token of rows with 1 .. call.few tokens. ``done`` int32 [>= B * Hkv] is zero before and after."""
    batch, kv, dim = call.batch, call.kv, call.q.shape[2]
    n_rows = batch.kv_len.shape[0]
    most = triton.cdiv(batch.max_kv_len, EXACT_CUT)
    width = call.few * call.group
    part = torch.empty(n_rows, most, call.n_kv, width, dim, dtype=torch.float32, device=call.q.device)
    weight = torch.empty(n_rows, most, call.n_kv, width, 2, dtype=torch.float32, device=call.q.device)
    pdl = can_overlap()
    grid = (min(n_rows * most * call.n_kv, PROGRAMS_PER_SM * sm_count()),)
    _cut_units[grid](
        call.q, kv, call.out, call.k_scale, call.v_scale, part, weight, done, batch.row_start, batch.kv_len, batch.page_table,
        n_rows, most, batch.page_table.shape[1], kv.stride(0), kv.stride(1), call.scale * LOG2E,
        PAGE=batch.page_tokens, TOKEN_STRIDE=kv.stride(2), HEAD_STRIDE=kv.stride(3), CUT=EXACT_CUT,
        ROWS=max(16, triton.next_power_of_2(n_rows)), FEW=call.few, WINDOW=call.window, HKV=call.n_kv, G=call.group,
        G_PAD=call.group_pad, D=dim, D_PAD=triton.next_power_of_2(dim), M=64,
        TILE=TILE, STAGES=STAGES, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _cuts(kv_len, n, CUT: tl.constexpr, WINDOW: tl.constexpr):
    """(first cut that any query of the row sees, number of cuts from there) of rows."""
    low = kv_len * 0
    if WINDOW > 0:
        low = tl.maximum(kv_len - n - WINDOW + 1, 0) // CUT
    return low, tl.cdiv(kv_len, CUT) - low


@triton.jit
def _locate(at, units_of, end_of, b):
    """(row, index within the row) of the ``at``-th unit when row b owns the units_of[b] units before end_of[b]."""
    row = tl.sum((end_of <= at).to(tl.int32), 0)
    return row, at - tl.sum(tl.where(b < row, units_of, 0), 0)


@triton.jit(do_not_specialize=["n_rows", "max_cuts", "table_width"])
def _cut_units(
    q_ptr, kv_ptr, out_ptr, k_scale_ptr, v_scale_ptr, part_ptr, weight_ptr, done_ptr, row_start_ptr, kv_len_ptr, table_ptr,
    n_rows, max_cuts, table_width, page_stride, kv_stride, scale,
    PAGE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, CUT: tl.constexpr,
    ROWS: tl.constexpr, FEW: tl.constexpr, WINDOW: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr,
    G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    b = tl.arange(0, ROWS)
    n_of = tl.load(row_start_ptr + b + 1, mask=b < n_rows, other=0) - tl.load(
        row_start_ptr + b, mask=b < n_rows, other=0
    )
    len_of = tl.load(kv_len_ptr + b, mask=b < n_rows, other=0)
    _, units_of = _cuts(len_of, n_of, CUT, WINDOW)
    units_of = tl.where((n_of > 0) & (n_of <= FEW), units_of, 0)
    end_of = tl.cumsum(units_of, 0)
    n_units = tl.sum(units_of, 0) * HKV

    m = tl.arange(0, M)
    d = tl.arange(0, D_PAD)
    query, g = m // G_PAD, m % G_PAD
    row, cut = _locate(tl.program_id(0) // HKV, units_of, end_of, b)
    wait_for_previous(PDL)
    for unit in tl.range(tl.program_id(0), n_units, tl.num_programs(0)):
        head = unit % HKV
        start = tl.load(row_start_ptr + row)
        n = tl.load(row_start_ptr + row + 1) - start
        kv_len = tl.load(kv_len_ptr + row)
        low, n_cuts = _cuts(kv_len, n, CUT, WINDOW)

        real = (query < n) & (query < FEW) & (g < G)
        inside = real[:, None] & (d[None, :] < D)
        q_at = ((start + query) * (HKV * G) + head * G + g).to(tl.int64) * D
        q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=inside, other=0.0)
        first = (low + cut) * CUT
        table = table_ptr + row.to(tl.int64) * table_width
        acc, top, total = attend(
            tl.zeros((M, D_PAD), tl.float32), tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32),
            q, kv_len - n + query, pages(table, first, kv_len, PAGE, TILE), first, tl.minimum(first + CUT, kv_len),
            table, kv_ptr + head * HEAD_STRIDE, page_stride, kv_stride, scale * head_scale(k_scale_ptr, head),
            PAGE, TOKEN_STRIDE, D, D_PAD, TILE, WINDOW, True, STAGES,
        )  # fmt: skip
        last = n_cuts == 1
        if n_cuts > 1:
            # cuts of a row and head lie STEP apart
            STEP: tl.constexpr = HKV * FEW * G
            place = ((row * max_cuts * HKV + head) * (FEW * G) + query * G + g).to(tl.int64)
            mine = place + cut.to(tl.int64) * STEP
            tl.store(part_ptr + mine[:, None] * D + d[None, :], acc, mask=inside)
            tl.store(weight_ptr + mine * 2, top, mask=real)
            tl.store(weight_ptr + mine * 2 + 1, total, mask=real)
            tl.debug_barrier()
            finished = tl.atomic_add(done_ptr + row * HKV + head, 1, sem="acq_rel", scope="gpu")
            last = finished == n_cuts - 1
            if last:
                tl.store(done_ptr + row * HKV + head, 0)
                acc, top, total = _merge(
                    part_ptr, weight_ptr, place, n_cuts, real, inside, d, STEP, M, D, D_PAD
                )
        if last:
            y = acc / total[:, None] * head_scale(v_scale_ptr, head)
            tl.store(out_ptr + q_at[:, None] + d[None, :], y.to(q.dtype), mask=inside)
        row, cut = _locate((unit + tl.num_programs(0)) // HKV, units_of, end_of, b)


@triton.jit
def _merge(
    part_ptr, weight_ptr, place, n_cuts, real, inside, d,
    STEP: tl.constexpr, M: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """All cuts of one row and head in their order; other programs wrote them, so the loads go past L1."""
    acc = tl.zeros((M, D_PAD), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    for cut in tl.range(0, n_cuts, 2):
        # two cuts in flight; one past the last has top = -inf and changes nothing
        p0, t0, s0 = load_part(part_ptr, weight_ptr, place + cut * STEP, real, inside, d, D)
        more = cut + 1 < n_cuts
        p1, t1, s1 = load_part(
            part_ptr, weight_ptr, place + (cut + 1) * STEP, real & more, inside & more, d, D
        )
        acc, top, total = merge(acc, top, total, p0, t0, s0)
        acc, top, total = merge(acc, top, total, p1, t1, s1)
    return acc, top, total
