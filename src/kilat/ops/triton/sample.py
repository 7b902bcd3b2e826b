"""draw: the whole draw of a row in one program: maximum, filters, inverse CDF. No sort: a filter is a threshold, found bit by bit."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kilat.ops.sample import Draws
from kilat.ops.triton.launch import can_overlap, let_next_start, wait_for_previous

BLOCK = 8192


def draw(logits: Tensor, draws: Draws | None, *, filtered: bool) -> Tensor:
    """Contract: ops/sample.py. Batch-invariant: a row is drawn by one program, with sums in fp64 in a fixed order."""
    logits = logits.contiguous()
    n_rows, vocab = logits.shape
    ids = torch.empty(n_rows, dtype=torch.int32, device=logits.device)
    if n_rows == 0:
        return ids
    block = min(BLOCK, triton.next_power_of_2(vocab))
    pdl = can_overlap()
    d = draws
    _draw[(n_rows,)](
        logits, ids, d.temperature if d else None, d.top_k if d else None, d.top_p if d else None, d.min_p if d else None,
        d.u if d else None, vocab,
        BLOCK=block, WIDE=logits.dtype == torch.float32, GREEDY=d is None, FILTERED=filtered and d is not None, PDL=pdl,
        num_warps=max(1, block // 512), launch_pdl=pdl,
    )  # fmt: skip
    return ids


@triton.jit
def _load(logits_ptr, v0, vocab, temperature, top, floor, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Tokens v0 .. v0 + BLOCK - 1: (ids, order-preserving keys, weights fp64; 0 where the scaled logit is below ``floor``).

    16-bit logits are ordered as they are, which has the same ties; fp32 logits after scaling, which may add ties.
    """
    at = v0 + tl.arange(0, BLOCK)
    logit = tl.load(logits_ptr + at, mask=at < vocab, other=float("-inf"))
    x = logit.to(tl.float32) / temperature
    bits = x.to(tl.int32, bitcast=True) if WIDE else logit.to(tl.int16, bitcast=True).to(tl.int32) << 16
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    weight = tl.where((x >= floor) & (at < vocab), tl.exp(x - top), 0.0).to(tl.float64)
    return at, key, weight


@triton.jit
def _mass(
    logits_ptr,
    vocab,
    temperature,
    top,
    floor,
    least,
    key,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Weight (or with COUNT number) of the tokens at or above each of three keys, least key + 1, 2, 3 steps, all in one pass."""
    a = tl.full((), 0.0, tl.float64)
    b, c = a, a
    for v0 in tl.range(0, vocab, BLOCK):
        at, k, w = _load(logits_ptr, v0, vocab, temperature, top, floor, BLOCK, WIDE)
        if COUNT:
            w = (at < vocab).to(tl.float64)
        a += tl.sum(tl.where(k >= least + key, w, 0.0), 0)
        b += tl.sum(tl.where(k >= least + 2 * key, w, 0.0), 0)
        c += tl.sum(tl.where(k >= least + 3 * key, w, 0.0), 0)
    return a, b, c


@triton.jit
def _total(logits_ptr, vocab, temperature, top, floor, least, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Weight of the tokens at or above ``least``."""
    a, _, _ = _mass(
        logits_ptr, vocab, temperature, top, floor, least, tl.full((), 0, tl.uint32), False, BLOCK, WIDE
    )
    return a


@triton.jit
def _threshold(
    logits_ptr,
    vocab,
    temperature,
    top,
    floor,
    wanted,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The largest key at or above which the tokens weigh (or with COUNT number) at least ``wanted``; two bits a pass."""
    least = tl.full((), 0, tl.uint32)
    for i in tl.static_range(16 if WIDE else 8):
        step = tl.full((), 1 << (30 - 2 * i), tl.uint32)
        a, b, c = _mass(logits_ptr, vocab, temperature, top, floor, least, step, COUNT, BLOCK, WIDE)
        more = (a >= wanted).to(tl.uint32) + (b >= wanted).to(tl.uint32) + (c >= wanted).to(tl.uint32)
        least += more * step
    return least


@triton.jit(do_not_specialize=["vocab"])
def _draw(
    logits_ptr, ids_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, u_ptr, vocab,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, GREEDY: tl.constexpr, FILTERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * vocab
    wait_for_previous(PDL)
    top = tl.full((), float("-inf"), tl.float32)
    chosen = tl.full((), 0, tl.int32)
    broken = tl.full((), 0, tl.int32)
    for v0 in tl.range(0, vocab, BLOCK):
        at = v0 + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        broken += tl.sum((x != x).to(tl.int32), 0)
        here = tl.max(x, 0)
        first = tl.min(tl.where(x == here, at, 2147483647), 0)
        chosen = tl.where(here > top, first, chosen)
        top = tl.maximum(top, here)
    broken += (tl.abs(top) == float("inf")).to(tl.int32)
    if not GREEDY:
        temperature = tl.load(temperature_ptr + row)
        if (temperature > 0) & (broken == 0):
            top = top / temperature
            floor = tl.full((), float("-inf"), tl.float32)
            least = tl.full((), 0, tl.uint32)
            if FILTERED:
                top_k, top_p, min_p = (
                    tl.load(top_k_ptr + row),
                    tl.load(top_p_ptr + row),
                    tl.load(min_p_ptr + row),
                )
                floor = top + tl.log(min_p)
                if (top_k > 0) & (top_k < vocab):
                    wanted = top_k.to(tl.float64)
                    least = _threshold(logits_ptr, vocab, temperature, top, floor, wanted, True, BLOCK, WIDE)
                if top_p < 1.0:
                    # the tokens that top_k left weigh ``left``; those at or above a higher key are among them
                    left = _total(logits_ptr, vocab, temperature, top, floor, least, BLOCK, WIDE)
                    nucleus = _threshold(
                        logits_ptr, vocab, temperature, top, floor, left * top_p, False, BLOCK, WIDE
                    )
                    least = tl.maximum(least, nucleus)
            total = _total(logits_ptr, vocab, temperature, top, floor, least, BLOCK, WIDE)
            target = total * tl.load(u_ptr + row).to(tl.float64)
            best = chosen
            chosen = tl.full((), -1, tl.int32)
            running = tl.full((), 0.0, tl.float64)
            for v0 in tl.range(0, vocab, BLOCK):
                at, key, w = _load(logits_ptr, v0, vocab, temperature, top, floor, BLOCK, WIDE)
                w = tl.where(key >= least, w, 0.0)
                here64 = tl.sum(w, 0)
                if (chosen < 0) & (running + here64 > target):
                    passed = running + tl.cumsum(w, 0) > target
                    # the sum and the scan may round apart; then it is the block's last token that has weight
                    chosen = tl.min(tl.where(passed, at, 2147483647), 0)
                    chosen = tl.minimum(chosen, tl.max(tl.where(w > 0, at, 0), 0))
                running += here64
            chosen = tl.where(chosen < 0, best, chosen)
    tl.store(ids_ptr + row, tl.where(broken > 0, -2, chosen))
