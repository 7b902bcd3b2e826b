"""Pressure: what traffic needs of each kind of work, over what is there, for every number of workers that only compute prompts.

The rest decode, and compute prompts in the time that their streams leave. All are taken as equally fast: rates and times are means.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from kilat.policy.scale.config import ScaleConfig
from kilat.policy.scale.window import RoleWorker, Window

LEAST_ROOM = 0.02
CHUNK_TOKENS = 2048
"""Of a prompt in a step that decodes nothing, as engines have it by default: each such step begins anew too."""
MOST_WRONG = 3.0
"""How many times as long as predicted a token may take."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """``decode``: the step time, places and pages of those that decode, whichever is scarcest. 1 is all that there is."""

    prefill: float
    decode: float

    @property
    def worst(self) -> float:
        return max(self.prefill, self.decode)


@dataclass(frozen=True, slots=True)
class Needs:
    """What traffic asks for in all, and what one worker can do. ``prompt_tokens_per_s`` of all that has to be computed, ``running``
    sessions with ``pages``; of one worker: ``rate`` of prompt tokens, seconds of a step without and for each session, ``most_running`` and
    ``most_pages``. Rate, and what a worker has of places and pages: 0 for not known, then they press on nobody."""

    prompt_tokens_per_s: float
    running: int
    pages: int
    rate: float
    base_s: float
    row_s: float
    most_running: float
    most_pages: float

    def pressures(self, n: int, config: ScaleConfig) -> list[Pressure]:
        """With 0, 1, ... of ``n`` workers computing prompts only."""
        out = []
        alone = 1 - self.base_s / (self.base_s + CHUNK_TOKENS / self.rate) if self.rate else 0.0
        for left in range(n, 0, -1):
            step_s = self.base_s + self.row_s * self.running / left
            room = max(1 - step_s / config.usual_step_s, LEAST_ROOM)
            prefill = _part(self.prompt_tokens_per_s, self.rate * ((n - left) * alone + left * room))
            crowd = max(
                _part(self.running, self.most_running * left), _part(self.pages, self.most_pages * left)
            )
            out.append(Pressure(prefill, max(step_s / config.tpot_slo_s, crowd)))
        return out


def needs(
    workers: Sequence[RoleWorker], arrivals_per_s: float, window: Window, config: ScaleConfig
) -> Needs | None:
    """What is needed now; None until it is known how fast tokens are written. ``arrivals_per_s``: prompt tokens."""
    running = sum(w.running for w in workers)
    measured_s = quantile(window.tpot_s, config.quantile)
    rate = _mean([w.prefill_tokens_per_s for w in workers])
    row_s = _mean([w.row_s for w in workers])
    # what is left of a step when its sessions are taken off
    base_s = _mean([w.step_s - w.row_s * w.running for w in workers if w.step_s > 0]) or measured_s
    if not base_s:
        return None
    # more than a worker computes within the target is one long prompt, which no other worker can help with, or shows in all queues
    late = rate * config.ttft_slo_s
    queued = sum(min(w.queued_prompt_tokens, late) for w in workers)
    predicted_s = base_s + row_s * running / (sum(w.decode_weight > 0 for w in workers) or 1)
    wrong = min(max(measured_s / predicted_s, 1.0), MOST_WRONG) if measured_s > config.tpot_slo_s else 1.0
    return Needs(
        prompt_tokens_per_s=max(arrivals_per_s, queued / config.ttft_slo_s),
        running=running,
        pages=sum(w.pages_used for w in workers),
        rate=rate,
        base_s=base_s * wrong,
        row_s=row_s * wrong,
        most_running=_mean([w.max_running for w in workers]),
        most_pages=_mean([w.n_pages for w in workers]),
    )


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least ``q`` of them do not exceed; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(ceil(q * len(ordered)) - 1, 0)]


def _part(used: float, most: float) -> float:
    return used / most if most else 0.0


def _mean(values: Sequence[float]) -> float:
    """Of those that are known."""
    known = [v for v in values if v > 0]
    return sum(known) / len(known) if known else 0.0
