"""RoleScaler: moves shares between prefill and decode when one side misses its target and the other has room.

A share is a half: a worker does only one kind of work, or both. Pressure is need / capacity, so pressure x shares is what a side
needs, and the shares are set so that both sides would have the same pressure. Nothing is moved for a small difference
(``act_above``, ``ratio``), for a short one (``patience``), or soon after a change (``cool_down_s``), whose effect is not seen yet.
Requests in place are not touched: they end where they are, only new ones see the new weights.
"""

from collections.abc import Sequence
from math import ceil

from kilat.policy.scale.config import ScaleConfig
from kilat.policy.scale.window import RoleWorker, Window

LEAST_PRESSURE, MOST_PRESSURE = 0.1, 3.0
UNKNOWN_TOKENS_PER_S = 1000.0
STANDING_QUEUE = 0.25
"""Part of the TTFT target that a queue must be worth before late first tokens count."""

Weights = dict[str, tuple[float, float]]


class RoleScaler:
    """Decides once per window. As long as two workers live, each kind of work keeps at least half a worker; one worker does both."""

    def __init__(self, config: ScaleConfig) -> None:
        self.config = config
        self._wish = 0
        self._n_windows = 0
        self._changed_s: float | None = None

    def on_window(self, window: Window, now_s: float) -> Weights | None:
        """New (prefill, decode) weights of the workers whose share changes, or None."""
        workers = [w for w in window.workers if not w.draining]
        if not workers:
            return None
        halves = {w.worker_id: _halves(w) for w in workers}
        have, most = sum(halves.values()), 2 * len(workers) - 1
        if not 1 <= have <= most or (len(workers) == 1 and have != 1):
            # somebody died or was switched off: a kind of work without a worker cannot wait for measurements
            return self._move(workers, halves, min(max(have, 1), most), now_s)
        want = self._want(window, workers, have, most)
        wish = (want > have) - (want < have)
        self._n_windows = self._n_windows + 1 if wish == self._wish else 1
        self._wish = wish
        is_cool = self._changed_s is None or now_s - self._changed_s >= self.config.cool_down_s
        if wish == 0 or self._n_windows < self.config.patience or not is_cool:
            return None
        return self._move(workers, halves, want, now_s)

    def pressures(self, window: Window) -> tuple[float, float]:
        """(prefill, decode): what is needed / what is there.

        Prefill needs to compute what comes in and what waits, within the target; late first tokens say more only while there is a
        queue, for without one they are the past. Decode needs its time per token within the target, and places for its sessions.
        """
        workers = [w for w in window.workers if not w.draining]
        rates = [w.prefill_tokens_per_s for w in workers if w.prefill_tokens_per_s > 0]
        unknown = sum(rates) / len(rates) if rates else UNKNOWN_TOKENS_PER_S
        rate = sum((w.prefill_tokens_per_s or unknown) * _halves(w) / 2 for w in workers) or unknown / 2
        queue = sum(w.queued_prompt_tokens for w in workers) / rate / self.config.ttft_slo_s
        prefill = max(window.prompt_tokens / window.seconds / rate, queue)
        if queue > STANDING_QUEUE:
            prefill = max(prefill, _quantile(window.ttft_s, self.config.quantile) / self.config.ttft_slo_s)
        places = sum(w.max_running * (2 - _halves(w)) / 2 for w in workers)
        # sessions still in place on a worker that has turned to prefill count too: they are what decode has to hold
        crowd = sum(w.running for w in workers) / places if places else 0.0
        tpot = _quantile(window.tpot_s, self.config.quantile) / self.config.tpot_slo_s
        return prefill, max(tpot, crowd)

    def _want(self, window: Window, workers: Sequence[RoleWorker], have: int, most: int) -> int:
        """Half workers that should do prefill."""
        prefill, decode = self.pressures(window)
        if max(prefill, decode) < self.config.act_above:
            return have
        prefill, decode = (min(max(p, LEAST_PRESSURE), MOST_PRESSURE) for p in (prefill, decode))
        if max(prefill, decode) < self.config.ratio * min(prefill, decode):
            return have
        needs_prefill, needs_decode = prefill * have, decode * (2 * len(workers) - have)
        want = 2 * len(workers) * needs_prefill / (needs_prefill + needs_decode)
        step = max(1, round(abs(want - have)))
        return min(max(have + step if want > have else have - step, 1), most)

    def _move(
        self, workers: Sequence[RoleWorker], halves: dict[str, int], want: int, now_s: float
    ) -> Weights | None:
        """Change as few workers as possible: those with the least work of the kind that they give up."""
        before = dict(halves)
        while (have := sum(halves.values())) != want:
            if have < want:
                able = [w for w in workers if halves[w.worker_id] < 2]
                # a worker that is half there goes on first, so that few do both
                chosen = min(able, key=lambda w: (halves[w.worker_id] != 1, w.running, w.worker_id))
                halves[chosen.worker_id] += 1
            else:
                able = [w for w in workers if halves[w.worker_id] > 0]
                chosen = min(
                    able, key=lambda w: (halves[w.worker_id] != 1, w.queued_prompt_tokens, w.worker_id)
                )
                halves[chosen.worker_id] -= 1
        changed = {i: (n / 2, 1 - n / 2) for i, n in halves.items() if n != before[i]}
        if not changed:
            return None
        self._changed_s, self._n_windows, self._wish = now_s, 0, 0
        return changed


def _halves(w: RoleWorker) -> int:
    """How many halves of a worker do prefill: 0, 1 or 2. Other weights are taken by their ratio."""
    total = w.prefill_weight + w.decode_weight
    return round(2 * w.prefill_weight / total) if total > 0 else 1


def _quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least ``q`` of them do not exceed; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(ceil(q * len(ordered)) - 1, 0)]
