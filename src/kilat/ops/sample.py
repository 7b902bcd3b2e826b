"""sample: one token id per row from logits, with counter-based randomness: no generator state exists anywhere.

The draw of a session at an output position depends on (logits, parameters, seed, position) only, so it is the same in any batch, after
a preemption, and on another machine with equal logits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DRAW = 0
"""Purpose word of the Philox counter for sampling a token; other uses of randomness at a position take other numbers."""

_MASK = 0xFFFFFFFF
_SHORT_LISTS = (512, 4096)


@dataclass(frozen=True, slots=True)
class Filter:
    """Sampling parameters of one row. ``temperature`` above 0; ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 switch a filter off.
    ``seed`` 64 bits; ``position`` is the sampled token's position in its session."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four 32-bit random words from a key and a counter (Salmon et al., SC'11)."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _MASK, (a >> 32) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, purpose: int = DRAW) -> float:
    """A number in (0, 1), an odd multiple of 2^-24: exactly representable in fp32 on every device."""
    word = philox((seed & _MASK, (seed >> 32) & _MASK), (position & _MASK, purpose, 0, 0))[0]
    return ((word >> 9) + 0.5) * 2.0**-23


def uniforms(seeds: np.ndarray, positions: np.ndarray, purpose: int = DRAW) -> np.ndarray:
    """:func:`uniform` of many (seed, position) pairs at once: int64 arrays [B] -> fp32 [B], the same numbers."""
    low = np.uint64(_MASK)
    k0, k1 = seeds.astype(np.uint64) & low, seeds.astype(np.uint64) >> np.uint64(32)
    c0, c1 = positions.astype(np.uint64) & low, np.full(len(seeds), purpose, np.uint64)
    c2 = c3 = np.zeros(len(seeds), np.uint64)
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> np.uint64(32)) ^ c1 ^ k0, b & low, (a >> np.uint64(32)) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return ((c0 >> np.uint64(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [B, V] -> (ids [B] int64, their logits [B]); the lowest id wins a tie. A row with a NaN gives NaN as its logit."""
    top, ids = logits.max(dim=-1)
    return ids, top


def sample_row(logits: Tensor, f: Filter) -> int:
    """logits [V] fp32, contiguous -> a token id.

    Order: temperature, min_p, top_k, top_p (over what is left). Every filter is a threshold on the logit, so tokens tied with the last
    one kept are kept too and no sort order can matter. Then inverse CDF at uniform(seed, position), in id order, sums in fp64.
    One row at a time: the shapes of all torch calls are then the same in every batch, and so are their bits.
    """
    x = logits / f.temperature
    top = float(x.max())
    threshold = -math.inf
    if f.min_p > 0:
        threshold = top + math.log(f.min_p)
    if 0 < f.top_k < x.numel():
        threshold = max(threshold, float(torch.topk(x, f.top_k).values[-1]))
    weights = torch.exp(x - top)
    if threshold > -math.inf:
        weights.masked_fill_(x < threshold, 0.0)
    if f.top_p < 1.0:
        weights.masked_fill_(x < _nucleus_threshold(x, weights, top, f.top_p), 0.0)
    cumulative = weights.cumsum(0, dtype=torch.float64)
    target = cumulative[-1] * uniform(f.seed, f.position)
    return int(torch.searchsorted(cumulative, target, right=True).clamp_(max=x.numel() - 1))


def sample_rows(logits: Tensor, filters: Sequence[Filter]) -> list[int]:
    """logits [B, V] fp32 -> the token id of each row as :func:`sample_row` draws it."""
    return [sample_row(row, f) for row, f in zip(logits, filters, strict=True)]


def _nucleus_threshold(x: Tensor, weights: Tensor, top: float, top_p: float) -> float:
    """Smallest logit of the smallest set of likeliest tokens whose share of ``weights`` reaches ``top_p``."""
    mass = weights.sum(dtype=torch.float64) * top_p
    # most often a short list of candidates holds the nucleus; sorting the whole vocabulary costs milliseconds
    for count in (*_SHORT_LISTS, x.numel()):
        best = torch.topk(x, min(count, x.numel())).values
        reached = (torch.exp(best - top).cumsum(0, dtype=torch.float64) >= mass).nonzero()
        if reached.numel():
            return float(best[reached[0, 0]])
    return -math.inf


def top_logprobs(logits: Tensor, token_id: int, k: int) -> tuple[float, list[tuple[int, float]]]:
    """logits [V] fp32 -> (log-probability of ``token_id``, the ``k`` likeliest as (id, log-probability), best first, ties by id)."""
    norm = torch.logsumexp(logits, 0)
    own = float(logits[token_id] - norm)
    if k == 0:
        return own, []
    floor = torch.topk(logits, k).values[-1]
    ids = (logits >= floor).nonzero().flatten()
    pairs = sorted(zip(ids.tolist(), (logits[ids] - norm).tolist()), key=lambda p: (-p[1], p[0]))
    return own, pairs[:k]


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampling parameters of a batch as tensors [B] on the logits' device: ``top_k`` int32, the others fp32; ``u`` is the uniform of each
    row's position. A row with temperature 0 is greedy."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    u: Tensor


def draw(logits: Tensor, draws: Draws | None, *, filtered: bool) -> Tensor:
    """logits [B, V] -> token ids [B] int32, without a word to the host; a row whose largest logit is not finite gives -2.

    The batch form of :func:`sample_row`, for devices where a launch per row would cost too much. ``draws`` None: every row is greedy.
    ``filtered`` False: no row has a top_k, top_p or min_p. Bits may depend on the batch where the device's scans do.
    """
    top, ids = logits.max(dim=-1)
    if draws is not None:
        ids = torch.where(draws.temperature > 0, _draw_rows(logits, draws, filtered=filtered), ids)
    return torch.where(torch.isfinite(top), ids, -2).to(torch.int32)


def _draw_rows(logits: Tensor, d: Draws, *, filtered: bool) -> Tensor:
    x = logits.float() / torch.where(d.temperature > 0, d.temperature, 1.0)[:, None]
    top = x.amax(-1, keepdim=True)
    weights = torch.exp(x - top)
    if filtered:
        best = x.sort(dim=-1, descending=True).values
        kth = best.gather(1, (d.top_k.long() - 1).clamp(0, x.shape[1] - 1)[:, None])
        threshold = torch.where(d.top_k[:, None] > 0, kth, -math.inf)
        threshold = torch.maximum(threshold, top + d.min_p.log()[:, None])
        kept = torch.where(best >= threshold, torch.exp(best - top), 0.0).cumsum(-1, dtype=torch.float64)
        reached = (kept >= kept[:, -1:] * d.top_p[:, None]).int().argmax(-1, keepdim=True)
        nucleus = torch.where(d.top_p[:, None] < 1, best.gather(1, reached), -math.inf)
        weights = torch.where(x < torch.maximum(threshold, nucleus), 0.0, weights)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = cumulative[:, -1:] * d.u[:, None]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=x.shape[1] - 1)
