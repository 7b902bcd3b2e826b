"""Attention of rows with few tokens: all tiles of keys of all rows and heads in one line, cut into equal shares, one per program.

A share is at most the end of one head's keys, some whole heads, and the beginning of another's. What a program computes of a head that it
shares with others goes to a workspace, from which the parts are merged. Every program counts the tiles of all rows from kv_len, so nothing
depends on host-known lengths and the work is even however different the rows are.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kilat.ops.triton.attention_call import LOG2E, Call
from kilat.ops.triton.attention_tiles import attend, head_scale, load_part, merge, pages, store_out
from kilat.ops.triton.launch import can_overlap, let_next_start, prefetch_l2, sm_count, wait_for_previous

KINDS = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float16: tl.float16}
FEW_ROWS = 8
MANY_ROWS, MOST_REGISTERS = 256, 168
"""Registers of a thread where more rows' output is quantized: with more, three programs of four warps do not fit a multiprocessor."""
SHORT = 2048
"""Up to FEW_ROWS rows with keys beyond this a head has many parts, and a second kernel merges them; otherwise it has a few, and who finishes
last does."""


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


def tuning(n_rows: int, *, merge_apart: bool) -> Tuning:
    """Measured on H200 at contexts of 512 to 800 tokens, up to 8 rows in whole steps."""
    if n_rows > FEW_ROWS:
        return Tuning(64, 3, 4, 3, 4, 64)
    if n_rows > 2:
        return Tuning(32, 5, 4, 3, 4, 64)
    return Tuning(64, 3, 4, 3, 1, 64) if merge_apart else Tuning(128, 2, 8, 2, 1, 64)


def decode_rows(call: Call, done: Tensor) -> None:
    """Writes ``call.out`` for every token of rows with 1 .. call.few tokens. ``done`` int32 [>= B * Hkv] is zero before and after."""
    batch, kv, dim = call.batch, call.kv, call.q.shape[2]
    n_rows = batch.kv_len.shape[0]
    merge_apart = n_rows <= FEW_ROWS and batch.max_kv_len > SHORT
    t = tuning(n_rows, merge_apart=merge_apart)
    n_programs = t.programs * sm_count()
    width = call.few * call.group
    # a program leaves at most two parts: at its beginning (even places) and at its end (odd places)
    part = torch.empty(n_programs * 2, width, dim, dtype=torch.float32, device=call.q.device)
    weight = torch.empty(n_programs * 2, width, 2, dtype=torch.float32, device=call.q.device)
    rows, d_pad, pdl = max(16, triton.next_power_of_2(n_rows)), triton.next_power_of_2(dim), can_overlap()
    scale_stride = 0 if call.out_scale is None else call.out_scale.stride(0)
    _shares[(n_programs,)](
        call.q, kv, call.out, call.out_scale, scale_stride, call.k_scale, call.v_scale, part, weight, done,
        batch.row_start, batch.kv_len, batch.page_table,
        n_rows, batch.page_table.shape[1], kv.stride(0), kv.stride(1), call.scale * LOG2E,
        PAGE=batch.page_tokens, TOKEN_STRIDE=kv.stride(2), HEAD_STRIDE=kv.stride(3), LEAST=t.least, ROWS=rows, FEW=call.few,
        WINDOW=call.window, HKV=call.n_kv, G=call.group, G_PAD=call.group_pad, D=dim, D_PAD=d_pad, M=max(16, call.group_pad),
        TILE=t.tile, STAGES=t.stages, AHEAD=t.ahead if pdl else 0, MERGE=not merge_apart, PDL=pdl, num_warps=t.warps,
        launch_pdl=pdl, maxnreg=MOST_REGISTERS if call.out_scale is not None and n_rows > MANY_ROWS else None,
    )  # fmt: skip
    if merge_apart:
        _merge[(n_rows, call.n_kv)](
            call.out, call.out_scale, scale_stride, call.v_scale, part, weight, batch.row_start, batch.kv_len, n_rows, n_programs,
            LEAST=t.least, ROWS=rows, FEW=call.few, WINDOW=call.window, HKV=call.n_kv, G=call.group, D=dim, D_PAD=d_pad,
            WIDTH=width, W=triton.next_power_of_2(width), TILE=t.tile, KIND=KINDS[call.q.dtype],
            PDL=pdl, num_warps=4, launch_pdl=pdl,
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
    SIZE: tl.constexpr = D * kv_ptr.dtype.element_ty.primitive_bitwidth // 8
    prefetch_l2(place, SIZE)
    prefetch_l2(place + kv_stride, SIZE)


@triton.jit
def _line(
    row_start_ptr, kv_len_ptr, n_rows, n_programs,
    ROWS: tl.constexpr, FEW: tl.constexpr, WINDOW: tl.constexpr, HKV: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """(tiles of all heads of each row [ROWS], where each row ends in the line [ROWS], tiles of the line, tiles of a share)."""
    b = tl.arange(0, ROWS)
    n = tl.load(row_start_ptr + b + 1, mask=b < n_rows, other=0) - tl.load(
        row_start_ptr + b, mask=b < n_rows, other=0
    )
    kv_len = tl.load(kv_len_ptr + b, mask=b < n_rows, other=0)
    tiles = tl.cdiv(kv_len, TILE) - _first_tile(kv_len, n, TILE, WINDOW)
    tiles = tl.where((n > 0) & (n <= FEW), tiles, 0) * HKV
    total = tl.sum(tiles, 0)
    return tiles, tl.cumsum(tiles, 0), total, tl.maximum(tl.cdiv(total, n_programs), LEAST)


@triton.jit
def _find(at, tiles_of, end_of, ROWS: tl.constexpr):
    """(row of tile ``at`` of the line, its first tile there)."""
    row = tl.sum((end_of <= at).to(tl.int32), 0)
    return row, tl.sum(tl.where(tl.arange(0, ROWS) < row, tiles_of, 0), 0)


@triton.jit(do_not_specialize=["n_rows", "table_width", "scale_stride"])
def _shares(
    q_ptr, kv_ptr, out_ptr, scale_ptr, scale_stride, k_scale_ptr, v_scale_ptr, part_ptr, weight_ptr, done_ptr, row_start_ptr, kv_len_ptr, table_ptr,
    n_rows, table_width, page_stride, kv_stride, scale,
    PAGE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, LEAST: tl.constexpr,
    ROWS: tl.constexpr, FEW: tl.constexpr, WINDOW: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr,
    G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, MERGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    tiles_of, end_of, line, share = _line(
        row_start_ptr, kv_len_ptr, n_rows, tl.num_programs(0), ROWS, FEW, WINDOW, HKV, TILE, LEAST
    )
    b = tl.arange(0, ROWS)
    pid = tl.program_id(0)
    at = pid * share
    stop = tl.minimum(at + share, line)
    # up to 256 rows looking each one up is as fast as going from row to row and takes fewer registers where the output is quantized
    IN_TURN: tl.constexpr = ROWS > 256
    m = tl.arange(0, M)
    d = tl.arange(0, D_PAD)
    query, g = m // G_PAD, m % G_PAD
    if AHEAD > 0 and at < stop:
        far_row = tl.sum((end_of <= at).to(tl.int32), 0)
        far_len = tl.load(kv_len_ptr + far_row)
        far_n = tl.load(row_start_ptr + far_row + 1) - tl.load(row_start_ptr + far_row)
        far_low = _first_tile(far_len, far_n, TILE, WINDOW)
        far_tiles = tl.cdiv(far_len, TILE) - far_low
        far = at - tl.sum(tl.where(b < far_row, tiles_of, 0), 0)
        _fetch(
            kv_ptr + far // far_tiles * HEAD_STRIDE, table_ptr + far_row.to(tl.int64) * table_width,
            (far_low + far % far_tiles) * TILE, far_len, page_stride, kv_stride, PAGE, TOKEN_STRIDE, D, AHEAD,
        )  # fmt: skip
    wait_for_previous(PDL)
    row, base, start, after, kv_len = at * 0, at * 0, at * 0, at * 0, at * 0
    if IN_TURN and at < stop:
        row, base = _find(at, tiles_of, end_of, ROWS)
        start = tl.load(row_start_ptr + row)
        after = tl.load(row_start_ptr + row + 1)
        kv_len = tl.load(kv_len_ptr + row)
    while at < stop:
        if not IN_TURN:
            row, base = _find(at, tiles_of, end_of, ROWS)
            start = tl.load(row_start_ptr + row)
            after = tl.load(row_start_ptr + row + 1)
            kv_len = tl.load(kv_len_ptr + row)
        n = after - start
        low = _first_tile(kv_len, n, TILE, WINDOW)
        tiles = tl.cdiv(kv_len, TILE) - low
        head = (at - base) // tiles
        origin = base + head * tiles
        count = tl.minimum(origin + tiles, stop) - at

        real = (query < n) & (query < FEW) & (g < G)
        inside = real[:, None] & (d[None, :] < D)
        q_at = ((start + query) * (HKV * G) + head * G + g).to(tl.int64) * D
        first = (low + at - origin) * TILE
        table = table_ptr + row.to(tl.int64) * table_width
        end = tl.minimum(first + count * TILE, kv_len)
        q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=inside, other=0.0)
        next_after, next_len = after, kv_len
        if IN_TURN:
            # the next row's numbers arrive while this one's keys are read
            next_row = tl.minimum(row + 1, n_rows - 1)
            next_after = tl.load(row_start_ptr + next_row + 1)
            next_len = tl.load(kv_len_ptr + next_row)
        acc, top, total = attend(
            tl.zeros((M, D_PAD), tl.float32), tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32),
            q, kv_len - n + query, pages(table, first, end, PAGE, TILE), first, end, table,
            kv_ptr + head * HEAD_STRIDE, page_stride, kv_stride, scale * head_scale(k_scale_ptr, head),
            PAGE, TOKEN_STRIDE, D, D_PAD, TILE, WINDOW, True, STAGES,
        )  # fmt: skip
        first_program, last_program = origin // share, (origin + tiles - 1) // share
        whole = first_program == last_program
        if first_program < last_program:
            line_of = query * G + g
            place = (pid * 2 + (at > pid * share).to(tl.int32)) * (FEW * G) + line_of
            tl.store(part_ptr + place[:, None] * D + d[None, :], acc, mask=inside)
            tl.store(weight_ptr + place * 2, top, mask=real)
            tl.store(weight_ptr + place * 2 + 1, total, mask=real)
            if MERGE:
                tl.debug_barrier()
                finished = tl.atomic_add(done_ptr + row * HKV + head, 1, sem="acq_rel", scope="gpu")
                whole = finished == last_program - first_program
                if whole:
                    tl.store(done_ptr + row * HKV + head, 0)
                    # the first part lies at its program's end, unless that program begins with the head
                    odd = (origin > first_program * share).to(tl.int32)
                    place = (first_program * 2 + odd) * (FEW * G) + line_of
                    acc, top, total = load_part(part_ptr, weight_ptr, place, real, inside, d, D)
                    for p in tl.range(first_program + 1, last_program + 1):
                        place = p * 2 * (FEW * G) + line_of
                        p_acc, p_top, p_total = load_part(part_ptr, weight_ptr, place, real, inside, d, D)
                        acc, top, total = merge(acc, top, total, p_acc, p_top, p_total)
        if whole:
            store_out(
                acc / total[:, None] * head_scale(v_scale_ptr, head), out_ptr, scale_ptr, scale_stride, start + query, head * G + g, real, d, HKV * G, D, q.dtype
            )  # fmt: skip
        at += count
        if IN_TURN and at == base + tiles * HKV:
            row, base, start, after, kv_len = row + 1, at, after, next_after, next_len
            # rows without tokens, and those of the other kernel, have no tiles in the line
            while (at < stop) & ((after == start) | (after - start > FEW)):
                row += 1
                start = after
                after = tl.load(row_start_ptr + row + 1)
                kv_len = tl.load(kv_len_ptr + row)


@triton.jit(do_not_specialize=["n_rows", "n_programs", "scale_stride"])
def _merge(
    out_ptr, scale_ptr, scale_stride, v_scale_ptr, part_ptr, weight_ptr, row_start_ptr, kv_len_ptr, n_rows, n_programs,
    LEAST: tl.constexpr, ROWS: tl.constexpr, FEW: tl.constexpr, WINDOW: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, TILE: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per row and head: adds the parts of a head that several programs shared, P of them at a time."""
    let_next_start(PDL)
    P: tl.constexpr = max(1, min(16, 8192 // (W * D_PAD)))
    row, head = tl.program_id(0), tl.program_id(1)
    tiles_of, _, _, share = _line(
        row_start_ptr, kv_len_ptr, n_rows, n_programs, ROWS, FEW, WINDOW, HKV, TILE, LEAST
    )
    b = tl.arange(0, ROWS)
    tiles = tl.sum(tl.where(b == row, tiles_of, 0), 0) // HKV
    origin = tl.sum(tl.where(b < row, tiles_of, 0), 0) + head * tiles
    first, last = origin // share, (origin + tiles - 1) // share
    # the first part lies at its program's end, unless that program begins with the head
    odd = (origin > first * share).to(tl.int32)
    start = tl.load(row_start_ptr + row)
    n = tl.load(row_start_ptr + row + 1) - start
    wait_for_previous(PDL)
    if (tiles > 0) & (first < last):
        line = tl.arange(0, W)
        d = tl.arange(0, D_PAD)
        real = (line < WIDTH) & (line // G < n)
        acc = tl.zeros((W, D_PAD), tl.float32)
        top = tl.full((W,), float("-inf"), tl.float32)
        total = tl.zeros((W,), tl.float32)
        for p0 in tl.range(first, last + 1, P):
            p = p0 + tl.arange(0, P)
            place = (p * 2 + tl.where(p == first, odd, 0))[:, None] * WIDTH + line[None, :]
            mask = (p <= last)[:, None] & real[None, :]
            tops = tl.load(weight_ptr + place * 2, mask=mask, other=float("-inf"))
            totals = tl.load(weight_ptr + place * 2 + 1, mask=mask, other=0.0)
            inside = mask[:, :, None] & (d < D)[None, None, :]
            parts = tl.load(part_ptr + place[:, :, None] * D + d[None, None, :], mask=inside, other=0.0)
            new_top = tl.maximum(top, tl.max(tops, 0))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            factor = tl.exp2(tops - base[None, :])
            old = tl.exp2(top - base)
            acc = acc * old[:, None] + tl.sum(parts * factor[:, :, None], 0)
            total = total * old + tl.sum(totals * factor, 0)
            top = new_top
        store_out(
            acc / total[:, None] * head_scale(v_scale_ptr, head), out_ptr, scale_ptr, scale_stride, start + line // G, head * G + line % G, real, d, HKV * G, D, KIND
        )  # fmt: skip
