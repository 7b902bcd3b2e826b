"""The inner loop that both attention kernels share: online softmax over tiles of keys that lie in pages."""

import triton
import triton.language as tl

from kilat.ops.triton.fp8_rows import group_scale, to_fp8

EXACT_CUT = 256


@triton.jit
def attend(
    acc, top, total, q, position, page, first, last, table_ptr, k_ptr, page_stride, kv_stride, scale,
    PAGE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, MASK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Keys first .. last - 1 (first a multiple of TILE) for queries q [M, D_PAD] at ``position`` [M]; none sees a key past last - 1.

    ``page`` are the pages of the first tile's tokens. State: acc [M, D_PAD] fp32 weighted sum, top [M] maximum score so far, total [M] sum of weights; scores are in powers of two.
    Without MASK ``last`` is a multiple of TILE and every key is visible to every query. Keys and values in e4m3 are multiplied as
    fp16, which holds them exactly; their scales are the caller's, see ``head_scale``. A NaN among such values is not seen as one.
    """
    d = tl.arange(0, D_PAD)
    FP8: tl.constexpr = k_ptr.dtype.element_ty == tl.float8e4nv
    KIND: tl.constexpr = tl.float16 if FP8 else q.dtype
    # TRAP: sums over pairs were wrong on an H200 where tiles have 64 rows and more (Triton 3.6), and right below
    PAIRS: tl.constexpr = FP8 and acc.shape[0] < 64
    q = q.to(KIND)
    if PAIRS:
        # values are read two by two: matrix units want them transposed, which shared memory does for 16 bits but not for 8
        even, odd = tl.split(tl.reshape(acc * (1.0 / 256.0), (acc.shape[0], D_PAD // 2, 2)))
        pair_ptr = (k_ptr + kv_stride).to(tl.pointer_type(tl.int16), bitcast=True)
        h = tl.arange(0, D_PAD // 2)
    # page ids are fetched one tile ahead: the loads of K and V then depend on registers only and can run several tiles ahead
    for start in tl.range(first, last, TILE, num_stages=STAGES):
        at = start + tl.arange(0, TILE)
        place = page.to(tl.int64) * page_stride + (at % PAGE) * TOKEN_STRIDE
        page = pages(table_ptr, start + TILE, last, PAGE, TILE)
        if MASK or D_PAD != D:
            # past kv_len a page holds anything, NaN included: zero it, since 0 * NaN would reach the sum
            k = tl.load(
                k_ptr + place[None, :] + d[:, None], mask=(at[None, :] < last) & (d[:, None] < D), other=0.0
            )
        else:
            k = tl.load(k_ptr + place[None, :] + d[:, None])
        s = tl.dot(q, k.to(KIND), input_precision="ieee") * scale
        if MASK:
            seen = (at[None, :] <= position[:, None]) & (at[None, :] < last)
            if WINDOW > 0:
                seen = seen & (at[None, :] > position[:, None] - WINDOW)
            s = tl.where(seen, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        # a query that has seen no key yet keeps top = -inf; 0 stands in so that no inf - inf appears
        base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASK else new_top
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        if PAIRS:
            pair = tl.load(
                pair_ptr + (place // 2)[:, None] + h[None, :],
                mask=(at[:, None] < last) & (h[None, :] < D // 2),
                other=0,
            )
            even = tl.dot(p.to(KIND), _fp16(pair), even * shrink[:, None])
            odd = tl.dot(p.to(KIND), _fp16(pair >> 8), odd * shrink[:, None])
        elif MASK or D_PAD != D:
            v = tl.load(
                k_ptr + kv_stride + place[:, None] + d[None, :],
                mask=(at[:, None] < last) & (d[None, :] < D),
                other=0.0,
            )
            acc = tl.dot(p.to(KIND), v.to(KIND), acc * shrink[:, None], input_precision="ieee")
        else:
            v = tl.load(k_ptr + kv_stride + place[:, None] + d[None, :])
            acc = tl.dot(p.to(KIND), v.to(KIND), acc * shrink[:, None], input_precision="ieee")
        top = new_top
    if PAIRS:
        acc = tl.reshape(tl.join(even, odd), acc.shape) * 256.0
    return acc, top, total


@triton.jit
def _fp16(bits):
    """The low byte of ``bits`` int16, an e4m3 number, as fp16 / 256: the exponents' zeros lie 8 apart."""
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def head_scale(scale_ptr, head):
    """The scale of a head's stored numbers; 1 for pages that need none."""
    if scale_ptr is not None:
        return tl.load(scale_ptr + head)
    else:
        return 1.0


@triton.jit
def store_out(
    y, out_ptr, scale_ptr, scale_stride, token, head, real, d, HEADS: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Results y [M, D_PAD] fp32 of ``head`` [M] of ``token`` [M], rounded to KIND; with ``scale_ptr`` a head is a group of e4m3."""
    y = y.to(KIND)
    at = (token * HEADS + head).to(tl.int64)[:, None] * D + d[None, :]
    inside = real[:, None] & (d[None, :] < D)
    if scale_ptr is not None:
        f = tl.where(inside, y.to(tl.float32), 0.0)
        scale = group_scale(tl.max(tl.abs(f), 1))
        tl.store(scale_ptr + head * scale_stride + token, scale, mask=real)
        tl.store(out_ptr + at, to_fp8(f, scale[:, None]), mask=inside)
    else:
        tl.store(out_ptr + at, y, mask=inside)


@triton.jit
def pages(table_ptr, start, last, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Page of each token start .. start + TILE - 1; page 0 for those at or past ``last``."""
    at = start + tl.arange(0, TILE)
    return tl.load(table_ptr + at // PAGE, mask=at < last, other=0)


@triton.jit
def merge(acc, top, total, part, part_top, part_total):
    """Adds a later cut of the keys to the running state; in this order and with these roundings everywhere."""
    new_top = tl.maximum(top, part_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    old, new = tl.exp2(top - base), tl.exp2(part_top - base)
    acc = tl.math.fma(part, new[:, None] + tl.zeros_like(part), acc * old[:, None])
    total = tl.math.fma(part_total, new, total * old)
    return acc, new_top, total


@triton.jit
def load_part(part_ptr, weight_ptr, at, real, inside, d, D: tl.constexpr):
    """A cut's state (acc, top, total) from rows ``at`` of the workspaces; another program wrote it, so the loads go past L1."""
    part = tl.load(part_ptr + at[:, None] * D + d[None, :], mask=inside, other=0.0, cache_modifier=".cg")
    top = tl.load(weight_ptr + at * 2, mask=real, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(weight_ptr + at * 2 + 1, mask=real, other=0.0, cache_modifier=".cg")
    return part, top, total
