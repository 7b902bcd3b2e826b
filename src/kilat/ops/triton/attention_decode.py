"""Attention of rows with few tokens: keys cut at fixed positions, every cut of every key/value head a unit of work; then the cuts merge.

The list of units is never stored: each program counts the units of all rows from kv_len and takes every n-th one. So the grid depends on
host-known bounds only, and programs share the work evenly however different the rows' lengths are.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kilat.ops.triton.attention_tiles import EXACT_SPLIT, LOG2E, Call, attend, merge
from kilat.ops.triton.launch import can_overlap, let_next_start, sm_count, wait_for_previous


@dataclass(frozen=True, slots=True)
class Tuning:
    """``split`` tokens per cut, ``tile`` tokens at a time with ``stages`` in flight, ``programs`` per multiprocessor."""

    split: int
    tile: int
    stages: int
    warps: int
    programs: int


def tuning(n_rows: int, exact: bool) -> Tuning:
    """Measured on H200. Small cuts where few rows must fill the device, large ones where partial results would cost traffic."""
    if exact:
        return Tuning(EXACT_SPLIT, 64, 3, 4, 2)
    return Tuning(128 if n_rows <= 16 else 256 if n_rows <= 64 else 512, 64, 4, 4, 3)


def decode_rows(call: Call) -> None:
    """Writes ``call.out`` for every token of rows with 1 .. call.few tokens."""
    batch, dim = call.batch, call.q.shape[2]
    n_rows = batch.kv_len.shape[0]
    t = tuning(n_rows, call.exact)
    n_splits = triton.cdiv(batch.max_kv_len, t.split)
    width = call.few * call.group
    part = torch.empty(n_rows, n_splits, call.n_kv, width, dim, dtype=torch.float32, device=call.q.device)
    weight = torch.empty(n_rows, n_splits, call.n_kv, width, 2, dtype=torch.float32, device=call.q.device)
    rows = max(16, triton.next_power_of_2(n_rows))
    _launch_split(call, part, weight, t, rows)
    if n_splits > 1:
        pdl = can_overlap()
        _merge[(call.q.shape[0], call.n_kv)](
            call.out, part, weight, batch.row_start, batch.kv_len, n_rows, n_splits,
            SPLIT=t.split, ROWS=rows, FEW=call.few, WINDOW=call.window, HKV=call.n_kv, G=call.group,
            G_PAD=call.group_pad, D=dim, D_PAD=triton.next_power_of_2(dim), PDL=pdl, num_warps=2, launch_pdl=pdl,
        )  # fmt: skip


def _launch_split(call: Call, part: Tensor, weight: Tensor, t: Tuning, rows: int) -> None:
    batch, kv, dim = call.batch, call.kv, call.q.shape[2]
    n_rows, n_splits = part.shape[0], part.shape[1]
    pdl = can_overlap()
    tile_rows = 64 if call.exact else 16
    grid = (min(n_rows * n_splits * call.n_kv, t.programs * sm_count()),)
    _split[grid](
        call.q, kv, call.out, part, weight, batch.row_start, batch.kv_len, batch.page_table,
        n_rows, n_splits, batch.page_table.shape[1], kv.stride(0), kv.stride(1), call.scale * LOG2E,
        PAGE=batch.page_tokens, TOKEN_STRIDE=kv.stride(2), HEAD_STRIDE=kv.stride(3), SPLIT=t.split, ROWS=rows,
        FEW=call.few, WINDOW=call.window, HKV=call.n_kv, G=call.group, G_PAD=call.group_pad, D=dim,
        D_PAD=triton.next_power_of_2(dim), M=max(tile_rows, call.group_pad), TILE=t.tile, STAGES=t.stages, PDL=pdl,
        num_warps=t.warps, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def first_split(kv_len, n, SPLIT: tl.constexpr, WINDOW: tl.constexpr):
    """Index of the first cut that any query of a row sees; 0 without a window."""
    if WINDOW > 0:
        return tl.maximum(kv_len - n - WINDOW + 1, 0) // SPLIT
    return kv_len * 0


@triton.jit
def _split(
    q_ptr, kv_ptr, out_ptr, part_ptr, weight_ptr, row_start_ptr, kv_len_ptr, table_ptr,
    n_rows, max_splits, table_width, page_stride, kv_stride, scale,
    PAGE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, FEW: tl.constexpr, WINDOW: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr,
    G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    b = tl.arange(0, ROWS)
    n_of = tl.load(row_start_ptr + b + 1, mask=b < n_rows, other=0) - tl.load(row_start_ptr + b, mask=b < n_rows, other=0)
    len_of = tl.load(kv_len_ptr + b, mask=b < n_rows, other=0)
    units_of = tl.cdiv(len_of, SPLIT) - first_split(len_of, n_of, SPLIT, WINDOW)
    units_of = tl.where((n_of > 0) & (n_of <= FEW), units_of, 0)
    end_of = tl.cumsum(units_of, 0)
    n_units = tl.sum(units_of, 0) * HKV

    m = tl.arange(0, M)
    d = tl.arange(0, D_PAD)
    query, g = m // G_PAD, m % G_PAD
    wait_for_previous(PDL)
    for unit in tl.range(tl.program_id(0), n_units, tl.num_programs(0)):
        head, at = unit % HKV, unit // HKV
        row = tl.sum((end_of <= at).to(tl.int32), 0)
        before = tl.sum(tl.where(b < row, units_of, 0), 0)
        start = tl.load(row_start_ptr + row)
        n = tl.load(row_start_ptr + row + 1) - start
        kv_len = tl.load(kv_len_ptr + row)
        low = first_split(kv_len, n, SPLIT, WINDOW)
        cut = low + at - before
        n_cuts = tl.cdiv(kv_len, SPLIT) - low

        real = (query < n) & (query < FEW) & (g < G)
        head_of = head * G + g
        q_at = ((start + query) * (HKV * G) + head_of).to(tl.int64) * D
        q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=real[:, None] & (d[None, :] < D), other=0.0)
        position = kv_len - n + query
        acc = tl.zeros((M, D_PAD), tl.float32)
        top = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc, top, total = attend(
            acc, top, total, q, position, cut * SPLIT, tl.minimum(cut * SPLIT + SPLIT, kv_len),
            table_ptr + row.to(tl.int64) * table_width, kv_ptr + head * HEAD_STRIDE, page_stride, kv_stride, scale,
            PAGE, TOKEN_STRIDE, D, D_PAD, TILE, WINDOW, True, STAGES,
        )  # fmt: skip
        if n_cuts == 1:
            y = (acc / total[:, None]).to(q.dtype)
            tl.store(out_ptr + q_at[:, None] + d[None, :], y, mask=real[:, None] & (d[None, :] < D))
        else:
            place = ((row * max_splits + cut - low) * HKV + head) * (FEW * G) + query * G + g
            place = place.to(tl.int64)
            tl.store(part_ptr + place[:, None] * D + d[None, :], acc, mask=real[:, None] & (d[None, :] < D))
            tl.store(weight_ptr + place * 2, top, mask=real)
            tl.store(weight_ptr + place * 2 + 1, total, mask=real)


@triton.jit
def _merge(
    out_ptr, part_ptr, weight_ptr, row_start_ptr, kv_len_ptr, n_rows, max_splits,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr, WINDOW: tl.constexpr, HKV: tl.constexpr,
    G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    token, head = tl.program_id(0), tl.program_id(1)
    b = tl.arange(0, ROWS)
    ends = tl.load(row_start_ptr + b + 1, mask=b < n_rows, other=2147483647)
    row = tl.sum((ends <= token).to(tl.int32), 0)
    start = tl.load(row_start_ptr + row, mask=row < n_rows, other=0)
    n = tl.load(row_start_ptr + row + 1, mask=row < n_rows, other=0) - start
    kv_len = tl.load(kv_len_ptr + row, mask=row < n_rows, other=0)
    n_cuts = tl.cdiv(kv_len, SPLIT) - first_split(kv_len, n, SPLIT, WINDOW)
    wait_for_previous(PDL)
    if (row < n_rows) & (n <= FEW) & (n_cuts > 1):
        g = tl.arange(0, G_PAD)
        d = tl.arange(0, D_PAD)
        inside = (g[:, None] < G) & (d[None, :] < D)
        acc = tl.zeros((G_PAD, D_PAD), tl.float32)
        top = tl.full((G_PAD,), float("-inf"), tl.float32)
        total = tl.zeros((G_PAD,), tl.float32)
        for cut in tl.range(0, n_cuts):
            place = ((row * max_splits + cut) * HKV + head) * (FEW * G) + (token - start) * G + g
            place = place.to(tl.int64)
            part = tl.load(part_ptr + place[:, None] * D + d[None, :], mask=inside, other=0.0)
            part_top = tl.load(weight_ptr + place * 2, mask=g < G, other=0.0)
            part_total = tl.load(weight_ptr + place * 2 + 1, mask=g < G, other=1.0)
            acc, top, total = merge(acc, top, total, part, part_top, part_total)
        y = acc / total[:, None]
        at = (token * HKV + head).to(tl.int64) * G * D
        tl.store(out_ptr + at + g[:, None] * D + d[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)
