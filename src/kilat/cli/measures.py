"""The arithmetic of a load test: arrivals, percentiles, and what a set of request timings amounts to.
Pure.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median


@dataclass(frozen=True, slots=True)
class Sample:
    """Timings of one request on one clock, in seconds. ``arrival_s`` is when it was due, so a late client
    counts as waiting time.

    ``event_s`` are the times of the stream's text events, the first token's first. ``error`` says why there
    was no answer.
    """

    arrival_s: float
    sent_s: float
    done_s: float
    event_s: tuple[float, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.event_s[0] - self.arrival_s

    @property
    def e2e_s(self) -> float:
        return self.done_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first, None for answers of one token."""
        if self.output_tokens < 2:
            return None
        return (self.event_s[-1] - self.event_s[0]) / (self.output_tokens - 1)

    def meets(self, slo_ms: Mapping[str, float]) -> bool:
        """Whether the request was answered within every limit (keys ttft, tpot, e2e; milliseconds)."""
        if self.error is not None or not self.event_s:
            return False
        values = {"ttft": self.ttft_s, "tpot": self.tpot_s or 0.0, "e2e": self.e2e_s}
        return all(values[name] * 1e3 <= limit for name, limit in slo_ms.items())


@dataclass(frozen=True, slots=True)
class Summary:
    """What one round amounts to. Distributions are in milliseconds: mean, p50, p90, p99; empty when nothing
    was measured.

    ``goodput_rps``: requests per second that met the limits. ``late_ms``: the longest time a request left the
    client after it was due.
    """

    requests: int
    errors: int
    elapsed_s: float
    request_rps: float
    output_tps: float
    total_tps: float
    goodput_rps: float
    cached_tokens: int
    late_ms: float
    ttft_ms: dict[str, float] = field(default_factory=dict)
    tpot_ms: dict[str, float] = field(default_factory=dict)
    itl_ms: dict[str, float] = field(default_factory=dict)
    e2e_ms: dict[str, float] = field(default_factory=dict)


def percentile(values: Sequence[float], p: float) -> float:
    """The p-th percentile, 0 to 100, linear between the two nearest ranks. ``values`` must not be empty."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * p / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def poisson_arrivals(rate_rps: float, n: int, seed: int) -> list[float]:
    """Arrival times in seconds of ``n`` requests of a Poisson process; the first comes at 0. Same seed, same
    times.
    """
    draw = random.Random(seed)
    times = [0.0]
    while len(times) < n:
        times.append(times[-1] + draw.expovariate(rate_rps))
    return times[:n]


def summarize(samples: Sequence[Sample], slo_ms: Mapping[str, float]) -> Summary:
    """Sum up one round. Rates are over the time from the first arrival to the last answer."""
    good = [s for s in samples if s.error is None and s.event_s]
    elapsed = max((s.done_s for s in samples), default=0.0) - min((s.arrival_s for s in samples), default=0.0)
    per_s = 1 / elapsed if elapsed > 0 else 0.0
    output = sum(s.output_tokens for s in good)
    gaps = [b - a for s in good for a, b in pairwise(s.event_s)]
    return Summary(
        requests=len(samples),
        errors=len(samples) - len(good),
        elapsed_s=elapsed,
        request_rps=len(good) * per_s,
        output_tps=output * per_s,
        total_tps=(output + sum(s.input_tokens for s in good)) * per_s,
        goodput_rps=sum(s.meets(slo_ms) for s in good) * per_s,
        cached_tokens=sum(s.cached_tokens for s in good),
        late_ms=max((s.sent_s - s.arrival_s for s in samples), default=0.0) * 1e3,
        ttft_ms=_distribution([s.ttft_s for s in good]),
        tpot_ms=_distribution([s.tpot_s for s in good if s.tpot_s is not None]),
        itl_ms=_distribution(gaps),
        e2e_ms=_distribution([s.e2e_s for s in good]),
    )


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest of a figure over rounds, and their number."""
    return {"median": median(values), "min": min(values), "max": max(values), "n": len(values)}


def _distribution(values_s: Sequence[float]) -> dict[str, float]:
    if not values_s:
        return {}
    ms = [v * 1e3 for v in values_s]
    return {"mean": fmean(ms), **{f"p{p}": percentile(ms, p) for p in (50, 90, 99)}}
