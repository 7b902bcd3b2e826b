"""Attention of rows with few tokens: all tiles of keys of all rows and heads in one line, cut into equal shares, one per program.

A share is at most the end of one head's keys, some whole heads, and the beginning of another's. What a program computes of a head that it
shares with others goes to a workspace, and whoever finishes a head last merges its parts. Every program counts the tiles of all rows from
kv_len, so nothing depends on host-known lengths and the work is even however different the rows are.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kilat.ops.triton.attention_tiles import LOG2E, Call, attend, pages
from kilat.ops.triton.launch import can_overlap, let_next_start, prefetch_l2, sm_count, wait_for_previous


@dataclass(frozen=True, slots=True)
class Tuning:
    """``tile`` tokens at a time with ``stages`` in flight; ``programs`` per multiprocessor, each with at least ``least`` tiles;
    ``ahead`` tokens of a program's first keys are fetched to L2 before q is there."""

    tile: int
    stages: int
    warps: int
    programs: int
    least: int
    ahead: int


def tuning(n_rows: int) -> Tuning:
    """Measured on H200."""
    if n_rows <= 4:
        return Tuning(64, 3, 4, 3, 1, 64)
    if n_rows < 32:
        return Tuning(32, 5, 4, 3, 4, 128)
    return Tuning(32, 4, 2, 4, 8, 0)


def decode_rows(call: Call, done: Tensor) -> None:
    """Writes ``call.out`` for every token of rows with 1 .. call.few tokens. ``done`` int32 [>= B * Hkv] is zero before and after."""
    batch, kv, dim = call.batch, call.kv, call.q.shape[2]
    n_rows = batch.kv_len.shape[0]
    t = tuning(n_rows)
    n_programs = t.programs * sm_count()
    # a program leaves at most two parts: at its beginning (even places) and at its end (odd places)
    part = torch.empty(n_programs * 2, call.few * call.group, dim, dtype=torch.float32, device=call.q.device)
    weight = torch.empty(n_programs * 2, call.few * call.group, 2, dtype=torch.float32, device=call.q.device)
    pdl = can_overlap()
    _shares[(n_programs,)](
        call.q, kv, call.out, part, weight, done, batch.row_start, batch.kv_len, batch.page_table,
        n_rows, batch.page_table.shape[1], kv.stride(0), kv.stride(1), call.scale * LOG2E,
        PAGE=batch.page_tokens, TOKEN_STRIDE=kv.stride(2), HEAD_STRIDE=kv.stride(3), LEAST=t.least,
        ROWS=max(16, triton.next_power_of_2(n_rows)), FEW=call.few, WINDOW=call.window, HKV=call.n_kv, G=call.group,
        G_PAD=call.group_pad, D=dim, D_PAD=triton.next_power_of_2(dim), M=max(16, call.group_pad),
        TILE=t.tile, STAGES=t.stages, AHEAD=t.ahead if pdl else 0, PDL=pdl, num_warps=t.warps,
        maxnreg=min(248, 65536 // (t.programs * t.warps * 32) // 8 * 8), launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _first_tile(kv_len, n, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The first tile that any of a row's ``n`` queries sees."""
    if WINDOW > 0:
        return tl.maximum(kv_len - n - WINDOW + 1, 0) // TILE
    return kv_len * 0


@triton.jit
def _fetch(
    kv_ptr, table_ptr, begin, kv_len, page_stride, kv_stride,
    PAGE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, D: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """To L2: K and V of tokens begin .. begin + AHEAD - 1. What earlier steps wrote is final while this step's K is being computed."""
    at = begin + tl.arange(0, AHEAD)
    page = tl.load(table_ptr + at // PAGE, mask=at < kv_len, other=0)
    place = kv_ptr + page.to(tl.int64) * page_stride + (at % PAGE) * TOKEN_STRIDE
    prefetch_l2(place, D * 2)
    prefetch_l2(place + kv_stride, D * 2)


@triton.jit(do_not_specialize=["n_rows", "table_width"])
def _shares(
    q_ptr, kv_ptr, out_ptr, part_ptr, weight_ptr, done_ptr, row_start_ptr, kv_len_ptr, table_ptr,
    n_rows, table_width, page_stride, kv_stride, scale,
    PAGE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, LEAST: tl.constexpr,
    ROWS: tl.constexpr, FEW: tl.constexpr, WINDOW: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr,
    G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    b = tl.arange(0, ROWS)
    n_of = tl.load(row_start_ptr + b + 1, mask=b < n_rows, other=0) - tl.load(
        row_start_ptr + b, mask=b < n_rows, other=0
    )
    len_of = tl.load(kv_len_ptr + b, mask=b < n_rows, other=0)
    tiles_of = tl.cdiv(len_of, TILE) - _first_tile(len_of, n_of, TILE, WINDOW)
    tiles_of = tl.where((n_of > 0) & (n_of <= FEW), tiles_of, 0) * HKV
    end_of = tl.cumsum(tiles_of, 0)
    n_tiles = tl.sum(tiles_of, 0)
    share = tl.maximum(tl.cdiv(n_tiles, tl.num_programs(0)), LEAST)
    pid = tl.program_id(0)
    at = pid * share
    stop = tl.minimum(at + share, n_tiles)

    m = tl.arange(0, M)
    d = tl.arange(0, D_PAD)
    query, g = m // G_PAD, m % G_PAD
    row, base, start, n, kv_len, low = _place(
        at, b, n_rows, tiles_of, end_of, row_start_ptr, kv_len_ptr, TILE, WINDOW
    )
    tiles = tl.maximum(tl.cdiv(kv_len, TILE) - low, 1)
    first = (low + (at - base) % tiles) * TILE
    table = table_ptr + row.to(tl.int64) * table_width
    page = pages(table, first, kv_len, PAGE, TILE)
    if AHEAD > 0 and at < stop:
        head_ptr = kv_ptr + (at - base) // tiles * HEAD_STRIDE
        _fetch(head_ptr, table, first, kv_len, page_stride, kv_stride, PAGE, TOKEN_STRIDE, D, AHEAD)
    wait_for_previous(PDL)
    while at < stop:
        head = (at - base) // tiles
        origin = base + head * tiles
        count = tl.minimum(origin + tiles, stop) - at

        real = (query < n) & (query < FEW) & (g < G)
        inside = real[:, None] & (d[None, :] < D)
        q_at = ((start + query) * (HKV * G) + head * G + g).to(tl.int64) * D
        q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=inside, other=0.0)
        acc, top, total = attend(
            tl.zeros((M, D_PAD), tl.float32), tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32),
            q, kv_len - n + query, page, first, tl.minimum(first + count * TILE, kv_len), table,
            kv_ptr + head * HEAD_STRIDE, page_stride, kv_stride, scale,
            PAGE, TOKEN_STRIDE, D, D_PAD, TILE, WINDOW, True, STAGES,
        )  # fmt: skip
        first_program, last_program = origin // share, (origin + tiles - 1) // share
        if first_program == last_program:
            tl.store(out_ptr + q_at[:, None] + d[None, :], (acc / total[:, None]).to(q.dtype), mask=inside)
        else:
            mine = (pid * 2 + (at > pid * share).to(tl.int32)) * (FEW * G) + query * G + g
            tl.store(part_ptr + mine[:, None] * D + d[None, :], acc, mask=inside)
            tl.store(weight_ptr + mine * 2, top, mask=real)
            tl.store(weight_ptr + mine * 2 + 1, total, mask=real)
            tl.debug_barrier()
            finished = tl.atomic_add(done_ptr + row * HKV + head, 1, sem="acq_rel", scope="gpu")
            if finished == last_program - first_program:
                tl.store(done_ptr + row * HKV + head, 0)
                # the head's first part is at its program's end, unless that program begins with it
                odd = (origin > first_program * share).to(tl.int32)
                _merge(
                    out_ptr + (start * HKV + head).to(tl.int64) * G * D, part_ptr, weight_ptr, n, first_program, last_program,
                    odd, FEW, HKV, G, D, D_PAD,
                )  # fmt: skip
        at += count
        row, base, start, n, kv_len, low = _place(
            at, b, n_rows, tiles_of, end_of, row_start_ptr, kv_len_ptr, TILE, WINDOW
        )
        tiles = tl.maximum(tl.cdiv(kv_len, TILE) - low, 1)
        first = (low + (at - base) % tiles) * TILE
        table = table_ptr + row.to(tl.int64) * table_width
        page = pages(table, first, kv_len, PAGE, TILE)


@triton.jit
def _place(
    at, b, n_rows, tiles_of, end_of, row_start_ptr, kv_len_ptr, TILE: tl.constexpr, WINDOW: tl.constexpr
):
    """The row that tile ``at`` of the line belongs to: (row, its first tile in the line, its first token, tokens, kv_len, first tile
    seen); all 0 past the end of the line."""
    row = tl.sum((end_of <= at).to(tl.int32), 0)
    there = row < n_rows
    row = tl.where(there, row, 0)
    base = tl.sum(tl.where(b < row, tiles_of, 0), 0)
    start = tl.load(row_start_ptr + row, mask=there, other=0)
    n = tl.load(row_start_ptr + row + 1, mask=there, other=0) - start
    kv_len = tl.load(kv_len_ptr + row, mask=there, other=0)
    return row, base, start, n, kv_len, _first_tile(kv_len, n, TILE, WINDOW)


@triton.jit
def _merge(
    out_ptr, part_ptr, weight_ptr, n, first_program, last_program, odd,
    FEW: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """All parts of one row and head, several at a time; other programs wrote them, so the loads go past L1."""
    WIDTH: tl.constexpr = FEW * G
    W: tl.constexpr = triton.next_power_of_2(WIDTH)
    P: tl.constexpr = max(1, min(16, 8192 // (W * D_PAD)))
    line = tl.arange(0, W)
    d = tl.arange(0, D_PAD)
    real = (line < WIDTH) & (line // G < n)
    acc = tl.zeros((W, D_PAD), tl.float32)
    top = tl.full((W,), float("-inf"), tl.float32)
    total = tl.zeros((W,), tl.float32)
    for p0 in tl.range(first_program, last_program + 1, P):
        p = p0 + tl.arange(0, P)
        place = (p * 2 + tl.where(p == first_program, odd, 0))[:, None] * WIDTH + line[None, :]
        mask = (p <= last_program)[:, None] & real[None, :]
        tops = tl.load(weight_ptr + place * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(weight_ptr + place * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
        parts = tl.load(
            part_ptr + place[:, :, None] * D + d[None, None, :], mask=mask[:, :, None] & (d < D)[None, None, :], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        share = tl.exp2(tops - base[None, :])
        old = tl.exp2(top - base)
        acc = acc * old[:, None] + tl.sum(parts * share[:, :, None], 0)
        total = total * old + tl.sum(totals * share, 0)
        top = new_top
    at = (line // G * HKV * G + line % G) * D
    y = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] + d[None, :], y, mask=real[:, None] & (d[None, :] < D))
