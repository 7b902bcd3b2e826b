"""draw: the whole draw of a row in one program: maximum, filters, inverse CDF. No sort: a filter is a threshold, found bit by bit."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kilat.ops.sample import Draws
from kilat.ops.triton.launch import can_overlap, let_next_start, wait_for_previous

BLOCK = 8192
R = 2


def draw(logits: Tensor, draws: Draws | None, *, filtered: bool) -> Tensor:
    """Contract: ops/sample.py. Batch-invariant: a row is drawn by one program that sums in a fixed order, across blocks in fp64."""
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
        BLOCK=block, R=R,
        N_GROUPS=triton.next_power_of_2(triton.cdiv(vocab, R * block)), WIDE=logits.dtype == torch.float32,
        GREEDY=d is None, FILTERED=filtered and d is not None, PDL=pdl, num_warps=max(1, block // 512), launch_pdl=pdl,
    )  # fmt: skip
    return ids


@triton.jit
def _logits(logits_ptr, v0, vocab, BLOCK: tl.constexpr, R: tl.constexpr):
    """R blocks from token v0 on, [R, BLOCK]: that many bytes in flight hide the way to L2."""
    at = v0 + tl.arange(0, R)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return tl.load(logits_ptr + at, mask=at < vocab, other=float("-inf"))


@triton.jit
def _keys(logit, temperature, WIDE: tl.constexpr):
    """(scaled logits fp32, keys uint32 in the same order). 16-bit logits are ordered as they are, which has the same ties; fp32 logits
    after scaling, which may add ties."""
    x = logit.to(tl.float32) / temperature
    bits = x.to(tl.int32, bitcast=True) if WIDE else logit.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return x, (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _block_sums(
    logits_ptr, vocab, temperature, top, floor, least,
    BLOCK: tl.constexpr, R: tl.constexpr, N_GROUPS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """[N_GROUPS * R] fp64: weight of the tokens of each block with key >= least and scaled logit >= floor."""
    index = tl.arange(0, N_GROUPS)[:, None]
    sums = tl.zeros((N_GROUPS, R), tl.float64)
    for i in tl.range(0, tl.cdiv(vocab, R * BLOCK)):
        x, key = _keys(_logits(logits_ptr, i * R * BLOCK, vocab, BLOCK, R), temperature, WIDE)
        here = tl.sum(tl.where((key >= least) & (x >= floor), tl.exp(x - top), 0.0), 1)
        sums = tl.where(index == i, here.to(tl.float64)[None, :], sums)
    return tl.reshape(sums, (N_GROUPS * R,))


@triton.jit
def _threshold(
    logits_ptr, vocab, temperature, top, floor, wanted,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The largest key at or above which the tokens weigh (or with COUNT number) at least ``wanted``; two bits a pass over the row.

    Every lane keeps three sums of its own (in fp32, of few terms), so that a pass reduces only once, in fp64.
    """
    least = tl.full((), 0, tl.uint32)
    for i in tl.static_range(16 if WIDE else 8):
        step = tl.full((), 1 << (30 - 2 * i), tl.uint32)
        a = tl.zeros((BLOCK,), tl.float32)
        b = tl.zeros((BLOCK,), tl.float32)
        c = tl.zeros((BLOCK,), tl.float32)
        for v0 in tl.range(0, vocab, R * BLOCK):
            x, key = _keys(_logits(logits_ptr, v0, vocab, BLOCK, R), temperature, WIDE)
            if COUNT:
                # what lies past the vocabulary is -inf, the smallest key but that of a NaN
                w = (x > float("-inf")).to(tl.float32)
            else:
                w = tl.where(x >= floor, tl.exp(x - top), 0.0)
            a += tl.sum(tl.where(key >= least + step, w, 0.0), 0)
            b += tl.sum(tl.where(key >= least + 2 * step, w, 0.0), 0)
            c += tl.sum(tl.where(key >= least + 3 * step, w, 0.0), 0)
        more = (tl.sum(a.to(tl.float64), 0) >= wanted).to(tl.uint32)
        more += (tl.sum(b.to(tl.float64), 0) >= wanted).to(tl.uint32)
        more += (tl.sum(c.to(tl.float64), 0) >= wanted).to(tl.uint32)
        least += more * step
    return least


@triton.jit
def _draw(
    logits_ptr, ids_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, u_ptr, vocab,
    BLOCK: tl.constexpr, R: tl.constexpr, N_GROUPS: tl.constexpr, WIDE: tl.constexpr, GREEDY: tl.constexpr, FILTERED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * vocab
    lane = tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_at = lane
    broken = tl.zeros((BLOCK,), tl.int32)
    for v0 in tl.range(0, vocab, R * BLOCK):
        x = _logits(logits_ptr, v0, vocab, BLOCK, R).to(tl.float32)
        broken |= tl.max((x != x).to(tl.int32), 0)
        here = tl.max(x, 0)
        at = v0 + tl.min(tl.where(x == here[None, :], tl.arange(0, R)[:, None], R), 0) * BLOCK + lane
        best_at = tl.where(here > best, at, best_at)
        best = tl.maximum(best, here)
    top = tl.max(best, 0)
    chosen = tl.min(tl.where(best == top, best_at, 2147483647), 0)
    bad = (tl.max(broken, 0) > 0) | (tl.abs(top) == float("inf"))
    if not GREEDY:
        temperature = tl.load(temperature_ptr + row)
        if (temperature > 0) & (bad == 0):
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
                    least = _threshold(
                        logits_ptr, vocab, temperature, top, floor, wanted, True, BLOCK, R, WIDE
                    )
                if top_p < 1.0:
                    # the tokens that top_k left weigh ``left``; those at or above a higher key are among them
                    left = tl.sum(
                        _block_sums(
                            logits_ptr, vocab, temperature, top, floor, least, BLOCK, R, N_GROUPS, WIDE
                        ),
                        0,
                    )
                    nucleus = _threshold(
                        logits_ptr, vocab, temperature, top, floor, left * top_p, False, BLOCK, R, WIDE
                    )
                    least = tl.maximum(least, nucleus)
            sums = _block_sums(logits_ptr, vocab, temperature, top, floor, least, BLOCK, R, N_GROUPS, WIDE)
            target = tl.sum(sums, 0) * tl.load(u_ptr + row).to(tl.float64)
            # the first block in which the sum passes the target; a sum and a scan may round apart, so blocks without weight are skipped
            ends = tl.cumsum(sums, 0)
            index = tl.arange(0, N_GROUPS * R)
            here = tl.min(tl.where((ends > target) & (sums > 0), index, N_GROUPS * R), 0)
            here = tl.minimum(here, tl.max(tl.where(sums > 0, index, 0), 0))
            before = tl.sum(tl.where(index < here, sums, 0.0), 0)
            x, key = _keys(
                tl.reshape(_logits(logits_ptr, here * BLOCK, vocab, BLOCK, 1), (BLOCK,)), temperature, WIDE
            )
            w = tl.where((key >= least) & (x >= floor), tl.exp(x - top), 0.0).to(tl.float64)
            passed = before + tl.cumsum(w, 0) > target
            drawn = tl.min(tl.where(passed & (w > 0), lane, BLOCK), 0)
            drawn = tl.minimum(drawn, tl.max(tl.where(w > 0, lane, 0), 0))
            chosen = here * BLOCK + drawn
    tl.store(ids_ptr + row, tl.where(bad, -2, chosen))
