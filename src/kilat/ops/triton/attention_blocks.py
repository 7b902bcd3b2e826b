"""Attention of long prompt chunks on Hopper: one producer warp feeds pages by TMA, two warpgroups multiply and take the softmax.

A program owns 128 rows, the queries of some tokens for all query heads of one key/value head. Each warpgroup works on 64 of them and runs the
product of scores one tile ahead of its softmax (the schedule of FlashAttention-3, arXiv:2407.08608); the two are not synchronised, so that one
multiplies while the other exponentiates. Tiles go from the last to the first: those that need a mask come first.

Pages of e4m3 go through a ring of their own, from which four warps, the producer among them, make fp16, which holds them exactly.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kilat.ops.fp8_linear import FP8
from kilat.ops.triton.attention_call import LOG2E, Call
from kilat.ops.triton.attention_tiles import head_scale
from kilat.ops.triton.launch import can_overlap

TILE = 128
STAGES = 2
RAW: gl.constexpr = gl.constexpr(3)
"""Tiles of e4m3 in flight, of K and V in turn."""


def can_take(call: Call) -> bool:
    """Whether the pages can be read by TMA as a matrix of tokens: bf16 or e4m3, whole tokens side by side, a head of 64 or 128 elements."""
    if (
        call.exact
        or not can_overlap()
        or call.q.dtype != torch.bfloat16
        or call.kv.dtype not in (torch.bfloat16, FP8)
    ):
        return False
    kv, dim = call.kv, call.q.shape[2]
    page, n_kv = call.batch.page_tokens, call.n_kv
    dense = kv.stride(3) == dim and kv.stride(2) == n_kv * dim and kv.stride(1) == page * n_kv * dim
    whole = kv.stride(0) % (n_kv * dim) == 0 and page in (16, 32, 64, 128)
    return dim in (64, 128) and dense and whole and call.group_pad <= 16


def block_rows(call: Call) -> None:
    """Writes ``call.out`` for every token of rows with more than call.few tokens."""
    batch, kv, dim = call.batch, call.kv, call.q.shape[2]
    n_rows, n_tokens = batch.kv_len.shape[0], call.q.shape[0]
    width = call.n_kv * dim
    # every token of the pool from this layer's first page on is one row of a matrix
    per_page = kv.stride(0) // width
    n_lines = (kv.shape[0] - 1) * per_page + 2 * batch.page_tokens
    lines = kv.as_strided((n_lines, width), (width, 1))
    fp8 = kv.dtype == FP8
    layout = gl.NVMMASharedLayout.get_default_for(
        [batch.page_tokens, dim], gl.float8e4nv if fp8 else gl.bfloat16
    )
    block = 128 // call.group_pad
    # row b owns the block numbers from row_start[b] // block + b on; at most this many blocks hold queries
    grid = (n_tokens // block + n_rows, call.n_kv)
    _blocks[grid](
        TensorDescriptor.from_tensor(lines, [batch.page_tokens, dim], layout),
        call.q, call.out, call.k_scale, call.v_scale, batch.row_start, batch.kv_len, batch.page_table,
        n_rows, batch.page_table.shape[1], per_page, call.scale * LOG2E,
        PAGE=batch.page_tokens, ROWS=max(32, triton.next_power_of_2(n_rows)), FEW=call.few, WINDOW=call.window, HKV=call.n_kv,
        G=call.group, G_PAD=call.group_pad, D=dim, TILE=TILE, STAGES=STAGES, FP8=fp8, num_warps=4, launch_pdl=True,
    )  # fmt: skip


@gluon.jit
def _produce(
    desc, table_ptr, per_page, col, first, n_tiles, kv_len, n_lines,
    k_ring, v_ring, k_full, k_free, v_full, v_free,
    PAGE: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fills the rings with tiles first + n_tiles - 1 .. first; pages past the row's end become zeros."""
    PAGES: gl.constexpr = TILE // PAGE
    for i in range(n_tiles):
        tile = first + n_tiles - 1 - i
        s = i % STAGES
        phase = (i // STAGES & 1) ^ 1
        lines = ()  # read all page ids before the first is needed
        for j in gl.static_range(PAGES):
            at = tile * PAGES + j
            page = gl.load(table_ptr + at, mask=at * PAGE < kv_len, other=0)
            lines += (gl.where(at * PAGE < kv_len, page * per_page, n_lines),)  # type: ignore[assignment]
        mbarrier.wait(k_free.index(s), phase)
        mbarrier.expect(k_full.index(s), TILE * D * 2)
        for j in gl.static_range(PAGES):
            tma.async_copy_global_to_shared(
                desc, [lines[j], col], k_full.index(s), k_ring.index(s).slice(j * PAGE, PAGE)
            )
        mbarrier.wait(v_free.index(s), phase)
        mbarrier.expect(v_full.index(s), TILE * D * 2)
        for j in gl.static_range(PAGES):
            tma.async_copy_global_to_shared(
                desc, [lines[j] + PAGE, col], v_full.index(s), v_ring.index(s).slice(j * PAGE, PAGE)
            )


@gluon.jit
def _ask(
    desc, table_ptr, per_page, col, first, n_tiles, kv_len, n_lines, m, raw, raw_full,
    PAGE: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Asks for the m-th tile of e4m3: K of the last tile, its V, K of the tile before ..."""
    tile = first + n_tiles - 1 - m // 2
    s = m % RAW
    wanted = m < 2 * n_tiles
    mbarrier.expect(raw_full.index(s), TILE * D, pred=wanted)
    for j in gl.static_range(TILE // PAGE):
        at = tile * (TILE // PAGE) + j
        inside = wanted & (at * PAGE < kv_len)
        page = gl.load(table_ptr + at, mask=inside, other=0)
        line = gl.where(inside, page * per_page + m % 2 * PAGE, n_lines)
        tma.async_copy_global_to_shared(
            desc, [line, col], raw_full.index(s), raw.index(s).slice(j * PAGE, PAGE), pred=wanted
        )


@gluon.jit
def _convert(
    raw, raw_full, m, ring, full, free, i, D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr
):
    """The m-th tile as fp16 to its place in the ring of tile ``i``'s K or V."""
    flat: gl.constexpr = gl.BlockedLayout([1, 16], [32 // (D // 16), D // 16], [4, 1], [1, 0])
    s = i % STAGES
    mbarrier.wait(raw_full.index(m % RAW), m // RAW & 1)
    mbarrier.wait(free.index(s), (i // STAGES & 1) ^ 1)
    for j in gl.static_range(TILE // 32):
        x = raw.index(m % RAW).slice(j * 32, 32).load(flat)
        ring.index(s).slice(j * 32, 32).store(x.to(gl.float16))
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(full.index(s), count=1)


@gluon.jit
def _produce_fp8(
    desc, table_ptr, per_page, col, first, n_tiles, kv_len, n_lines, raw, raw_full,
    k_ring, v_ring, k_full, k_free, v_full, v_free,
    PAGE: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As _produce, with four warps."""
    for j in gl.static_range(RAW):
        _ask(desc, table_ptr, per_page, col, first, n_tiles, kv_len, n_lines, j, raw, raw_full, PAGE, D, TILE)
    for i in range(n_tiles):
        m = 2 * i
        _convert(raw, raw_full, m, k_ring, k_full, k_free, i, D, TILE, STAGES)
        _ask(desc, table_ptr, per_page, col, first, n_tiles, kv_len, n_lines, m + RAW, raw, raw_full, PAGE, D, TILE)  # fmt: skip
        _convert(raw, raw_full, m + 1, v_ring, v_full, v_free, i, D, TILE, STAGES)
        _ask(desc, table_ptr, per_page, col, first, n_tiles, kv_len, n_lines, m + 1 + RAW, raw, raw_full, PAGE, D, TILE)  # fmt: skip


@gluon.jit
def _scores(
    s,
    tile,
    position,
    lowest,
    highest,
    kv_len,
    scale,
    TILE: gl.constexpr,
    WINDOW: gl.constexpr,
    mma: gl.constexpr,
):
    """Scores in powers of two; -inf where a key is not to be seen. Only tiles at the ends pay for the mask."""
    s = s * scale
    key = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, mma))
    edge = tile * TILE + TILE > lowest + 1
    if WINDOW > 0:
        edge = edge | (tile * TILE <= highest - WINDOW)
    if edge:
        seen = (key[None, :] <= position[:, None]) & (key[None, :] < kv_len)
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        s = gl.where(seen, s, float("-inf"))
    return s


@gluon.jit
def _consume(
    q_smem, k_ring, v_ring, k_full, k_free, v_full, v_free, out_ptr,
    first, n_tiles, first_query, start, n, kv_len, head, scale, v_scale,
    PART: gl.constexpr, WINDOW: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, G_PAD: gl.constexpr, D: gl.constexpr,
    PAGE: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BLOCK: gl.constexpr = 128 // G_PAD
    KIND: gl.constexpr = q_smem.dtype
    mma_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    mma_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma_o, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    row_s: gl.constexpr = gl.SliceLayout(1, mma_s)
    row_o: gl.constexpr = gl.SliceLayout(1, mma_o)
    r = PART * 64 + gl.arange(0, 64, row_s)
    position = kv_len - n + first_query + r // G_PAD
    lowest = kv_len - n + first_query
    highest = lowest + BLOCK - 1

    tile = first + n_tiles - 1
    mbarrier.wait(k_full.index(0), 0)
    zero = gl.zeros((64, TILE), gl.float32, mma_s)
    s = warpgroup_mma(q_smem, k_ring.index(0).permute((1, 0)), zero, use_acc=False)
    mbarrier.arrive(k_free.index(0), count=1)
    s = _scores(s, tile, position, lowest, highest, kv_len, scale, TILE, WINDOW, mma_s)
    top = gl.max(s, 1)
    base = gl.where(top == float("-inf"), 0.0, top)
    p = gl.exp2(s - base[:, None])
    total = gl.sum(p, 1)
    acc = gl.zeros((64, D), gl.float32, mma_o)
    if (tile * TILE + TILE > kv_len) & (kv_len % PAGE > 0):
        # the row's last page holds anything past kv_len, and 0 * NaN would reach the sum
        mbarrier.wait(v_full.index(0), 0)
        key = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, flat))
        v = v_ring.index(0).load(flat)
        v_ring.index(0).store(gl.where(key[:, None] < kv_len, v, 0.0))
        fence_async_shared()
        gl.thread_barrier()
    for i in range(1, n_tiles):
        k_at, v_at = i % STAGES, (i - 1) % STAGES
        weights = gl.convert_layout(p.to(KIND), left)
        mbarrier.wait(k_full.index(k_at), i // STAGES & 1)
        s = warpgroup_mma(q_smem, k_ring.index(k_at).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_at), (i - 1) // STAGES & 1)
        acc = warpgroup_mma(weights, v_ring.index(v_at), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(k_free.index(k_at), count=1)
        s = _scores(s, tile - i, position, lowest, highest, kv_len, scale, TILE, WINDOW, mma_s)
        new_top = gl.maximum(top, gl.max(s, 1))
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = gl.exp2(top - base)
        p = gl.exp2(s - base[:, None])
        total = total * shrink + gl.sum(p, 1)
        top = new_top
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_free.index(v_at), count=1)
        acc = acc * gl.convert_layout(shrink, row_o)[:, None]
    v_at = (n_tiles - 1) % STAGES
    weights = gl.convert_layout(p.to(KIND), left)
    mbarrier.wait(v_full.index(v_at), (n_tiles - 1) // STAGES & 1)
    acc = warpgroup_mma(weights, v_ring.index(v_at), acc)
    y = acc / gl.convert_layout(total, row_o)[:, None] * v_scale

    y = gl.convert_layout(y.to(gl.bfloat16), flat)
    r = PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, flat))
    d = gl.arange(0, D, gl.SliceLayout(0, flat))
    query = first_query + r // G_PAD
    at = ((start + query) * (HKV * G) + head * G + r % G_PAD).to(gl.int64) * D
    gl.store(out_ptr + at[:, None] + d[None, :], y, mask=((query < n) & (r % G_PAD < G))[:, None])


@gluon.jit
def _load_q(
    q_ptr,
    q_smem,
    PART: gl.constexpr,
    first_query,
    start,
    n,
    head,
    HKV: gl.constexpr,
    G: gl.constexpr,
    G_PAD: gl.constexpr,
    D: gl.constexpr,
):
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    r = PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, flat))
    d = gl.arange(0, D, gl.SliceLayout(0, flat))
    query = first_query + r // G_PAD
    at = ((start + query) * (HKV * G) + head * G + r % G_PAD).to(gl.int64) * D
    q = gl.load(q_ptr + at[:, None] + d[None, :], mask=((query < n) & (r % G_PAD < G))[:, None], other=0.0)
    q_smem.store(q.to(q_smem.dtype))


@gluon.jit(do_not_specialize=["n_rows", "table_width"])
def _blocks(
    desc, q_ptr, out_ptr, k_scale_ptr, v_scale_ptr, row_start_ptr, kv_len_ptr, table_ptr, n_rows, table_width, per_page, scale,
    PAGE: gl.constexpr, ROWS: gl.constexpr, FEW: gl.constexpr, WINDOW: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr,
    G_PAD: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    BLOCK: gl.constexpr = 128 // G_PAD
    # late blocks see the most keys: start them first
    number = gl.num_programs(0) - 1 - gl.program_id(0)
    head = gl.program_id(1)
    b = gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [4], [0]))
    first_block = gl.load(row_start_ptr + b, mask=b < n_rows, other=0) // BLOCK + b
    row = gl.sum(((first_block <= number) & (b < n_rows)).to(gl.int32), 0) - 1
    start = gl.load(row_start_ptr + row)
    n = gl.load(row_start_ptr + row + 1) - start
    kv_len = gl.load(kv_len_ptr + row)
    first_query = (number - start // BLOCK - row) * BLOCK
    gdc_wait()
    if (n > FEW) & (first_query < n):
        lowest = kv_len - n + first_query
        last = gl.minimum(lowest + BLOCK, kv_len)
        first = 0
        if WINDOW > 0:
            first = gl.maximum(lowest - WINDOW + 1, 0) // TILE
        n_tiles = gl.cdiv(last, TILE) - first
        KIND: gl.constexpr = gl.float16 if FP8 else gl.bfloat16
        q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], KIND)
        ring: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, D], KIND)
        q0 = gl.allocate_shared_memory(KIND, [64, D], q_layout)
        q1 = gl.allocate_shared_memory(KIND, [64, D], q_layout)
        k_ring = gl.allocate_shared_memory(KIND, [STAGES, TILE, D], ring)
        v_ring = gl.allocate_shared_memory(KIND, [STAGES, TILE, D], ring)
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for j in gl.static_range(STAGES):
            mbarrier.init(k_full.index(j), count=1)
            mbarrier.init(v_full.index(j), count=1)
            mbarrier.init(k_free.index(j), count=2)
            mbarrier.init(v_free.index(j), count=2)
        if FP8:
            raw_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, D], gl.float8e4nv)
            raw = gl.allocate_shared_memory(gl.float8e4nv, [RAW, TILE, D], raw_layout)
            raw_full = gl.allocate_shared_memory(gl.int64, [RAW, 1], mbarrier.MBarrierLayout())
            for j in gl.static_range(RAW):
                mbarrier.init(raw_full.index(j), count=1)
        _load_q(q_ptr, q0, 0, first_query, start, n, head, HKV, G, G_PAD, D)
        _load_q(q_ptr, q1, 1, first_query, start, n, head, HKV, G, G_PAD, D)
        fence_async_shared()
        gl.thread_barrier()
        table = table_ptr + row.to(gl.int64) * table_width
        scale *= head_scale(k_scale_ptr, head)
        v_scale = head_scale(v_scale_ptr, head)
        if FP8:
            gl.warp_specialize(
                [
                    (_consume, (q0, k_ring, v_ring, k_full, k_free, v_full, v_free, out_ptr, first, n_tiles, first_query, start, n, kv_len, head, scale, v_scale, 0, WINDOW, HKV, G, G_PAD, D, PAGE, TILE, STAGES)),
                    (_consume, (q1, k_ring, v_ring, k_full, k_free, v_full, v_free, out_ptr, first, n_tiles, first_query, start, n, kv_len, head, scale, v_scale, 1, WINDOW, HKV, G, G_PAD, D, PAGE, TILE, STAGES)),
                    (_produce_fp8, (desc, table, per_page, head * D, first, n_tiles, kv_len, desc.shape[0], raw, raw_full, k_ring, v_ring, k_full, k_free, v_full, v_free, PAGE, D, TILE, STAGES)),
                ],
                [4, 4],
                [224, 64],
            )  # fmt: skip
        else:
            gl.warp_specialize(
                [
                    (_consume, (q0, k_ring, v_ring, k_full, k_free, v_full, v_free, out_ptr, first, n_tiles, first_query, start, n, kv_len, head, scale, v_scale, 0, WINDOW, HKV, G, G_PAD, D, PAGE, TILE, STAGES)),
                    (_consume, (q1, k_ring, v_ring, k_full, k_free, v_full, v_free, out_ptr, first, n_tiles, first_query, start, n, kv_len, head, scale, v_scale, 1, WINDOW, HKV, G, G_PAD, D, PAGE, TILE, STAGES)),
                    (_produce, (desc, table, per_page, head * D, first, n_tiles, kv_len, desc.shape[0], k_ring, v_ring, k_full, k_free, v_full, v_free, PAGE, D, TILE, STAGES)),
                ],
                [4, 1],
                [232, 40],
            )  # fmt: skip
