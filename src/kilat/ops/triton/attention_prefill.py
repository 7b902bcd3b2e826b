"""Attention of prompt chunks: blocks of queries of all heads of a group, over all keys they see, in one program."""

import triton
import triton.language as tl

from kilat.ops.triton.attention_call import LOG2E, Call
from kilat.ops.triton.attention_tiles import EXACT_CUT, attend, head_scale, merge, pages
from kilat.ops.triton.launch import can_overlap, let_next_start, wait_for_previous


def prefill_rows(call: Call) -> None:
    """Writes ``call.out`` for every token of rows with more than call.few tokens."""
    batch, kv, dim = call.batch, call.kv, call.q.shape[2]
    n_rows, n_tokens = batch.kv_len.shape[0], call.q.shape[0]
    tile_rows = max(64 if call.exact else 128, call.group_pad)
    block = tile_rows // call.group_pad
    pdl = can_overlap()
    # row b owns the block numbers from row_start[b] // block + b on; at most this many blocks hold queries
    grid = (n_tokens // block + n_rows, call.n_kv)
    _blocks[grid](
        call.q, kv, call.out, call.k_scale, call.v_scale, batch.row_start, batch.kv_len, batch.page_table,
        n_rows, batch.page_table.shape[1], kv.stride(0), kv.stride(1), call.scale * LOG2E,
        PAGE=batch.page_tokens, TOKEN_STRIDE=kv.stride(2), HEAD_STRIDE=kv.stride(3), CUT=EXACT_CUT,
        ROWS=max(16, triton.next_power_of_2(n_rows)), FEW=call.few, WINDOW=call.window, HKV=call.n_kv, G=call.group,
        G_PAD=call.group_pad, D=dim, D_PAD=triton.next_power_of_2(dim), M=tile_rows, TILE=64, STAGES=3,
        EXACT=call.exact, PDL=pdl, num_warps=4 if tile_rows == 64 else 8, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "table_width"])
def _blocks(
    q_ptr, kv_ptr, out_ptr, k_scale_ptr, v_scale_ptr, row_start_ptr, kv_len_ptr, table_ptr,
    n_rows, table_width, page_stride, kv_stride, scale,
    PAGE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, CUT: tl.constexpr,
    ROWS: tl.constexpr, FEW: tl.constexpr, WINDOW: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr,
    G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    BLOCK: tl.constexpr = M // G_PAD
    # late blocks see the most keys: start them first
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    b = tl.arange(0, ROWS)
    first_block = tl.load(row_start_ptr + b, mask=b < n_rows, other=0) // BLOCK + b
    row = tl.sum(((first_block <= number) & (b < n_rows)).to(tl.int32), 0) - 1
    start = tl.load(row_start_ptr + row)
    n = tl.load(row_start_ptr + row + 1) - start
    kv_len = tl.load(kv_len_ptr + row)
    first_query = (number - start // BLOCK - row) * BLOCK
    wait_for_previous(PDL)
    if (n > FEW) & (first_query < n):
        m = tl.arange(0, M)
        d = tl.arange(0, D_PAD)
        query, g = first_query + m // G_PAD, m % G_PAD
        real = (query < n) & (g < G)
        q_at = ((start + query) * (HKV * G) + head * G + g).to(tl.int64) * D
        q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=real[:, None] & (d[None, :] < D), other=0.0)
        position = kv_len - n + query
        lowest = kv_len - n + first_query
        last = tl.minimum(lowest + BLOCK, kv_len)
        acc = tl.zeros((M, D_PAD), tl.float32)
        top = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        table = table_ptr + row.to(tl.int64) * table_width
        k_ptr = kv_ptr + head * HEAD_STRIDE
        scale = scale * head_scale(k_scale_ptr, head)
        first = lowest * 0
        if WINDOW > 0:
            first = tl.maximum(lowest - WINDOW + 1, 0) // TILE * TILE
        if EXACT:
            for cut in tl.range(first // CUT, tl.cdiv(last, CUT)):
                part = tl.zeros((M, D_PAD), tl.float32)
                part_top = tl.full((M,), float("-inf"), tl.float32)
                part_total = tl.zeros((M,), tl.float32)
                part, part_top, part_total = attend(
                    part, part_top, part_total, q, position, pages(table, tl.maximum(cut * CUT, first), last, PAGE, TILE), tl.maximum(cut * CUT, first),
                    tl.minimum(cut * CUT + CUT, last), table, k_ptr, page_stride, kv_stride, scale,
                    PAGE, TOKEN_STRIDE, D, D_PAD, TILE, WINDOW, True, STAGES,
                )  # fmt: skip
                acc, top, total = merge(acc, top, total, part, part_top, part_total)
        else:
            # tiles that every query of the block sees whole need no mask
            plain = first
            if WINDOW == 0:
                plain = (lowest + 1) // TILE * TILE
                acc, top, total = attend(
                    acc, top, total, q, position, pages(table, first, last, PAGE, TILE), first, plain, table, k_ptr, page_stride, kv_stride, scale,
                    PAGE, TOKEN_STRIDE, D, D_PAD, TILE, WINDOW, False, STAGES,
                )  # fmt: skip
            acc, top, total = attend(
                acc, top, total, q, position, pages(table, plain, last, PAGE, TILE), plain, last, table, k_ptr, page_stride, kv_stride, scale,
                PAGE, TOKEN_STRIDE, D, D_PAD, TILE, WINDOW, True, STAGES,
            )  # fmt: skip
        y = acc / total[:, None] * head_scale(v_scale_ptr, head)
        tl.store(out_ptr + q_at[:, None] + d[None, :], y.to(q.dtype), mask=real[:, None] & (d[None, :] < D))
