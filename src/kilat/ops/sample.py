"""sample: one token id per row from logits, with counter-based randomness: no generator state exists anywhere.

The draw of a session at an output position depends on (logits, parameters, seed, position) only, so it is the same in any batch, after
a preemption, and on another machine with equal logits.
"""

import math
from dataclasses import dataclass

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
    weights[x < threshold] = 0.0
    if f.top_p < 1.0:
        nucleus = _nucleus_threshold(x, weights, top, f.top_p)
        weights[x < nucleus] = 0.0
    cumulative = weights.cumsum(0, dtype=torch.float64)
    target = cumulative[-1] * uniform(f.seed, f.position)
    return int(torch.searchsorted(cumulative, target, right=True).clamp_(max=x.numel() - 1))


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
