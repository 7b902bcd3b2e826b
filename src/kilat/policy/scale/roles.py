"""RoleScaler: how many workers compute prompts only, so that both targets are kept with the least that has to move.

A worker that only computes prompts does so in large chunks, faster than one that must keep the steps of its streams short; but what it
computed has to move, and its memory holds nobody's session. So all workers do both while that is enough, and as many as are needed
compute prompts only when it is not. Nothing is changed for a short pressure (``patience``) or soon after a change (``cool_down_s``), whose
effect is not seen yet, and there is a gap between the pressures at which workers are set apart and come back (``ratio``). Sessions in
place are not touched: they end where they are, only new ones see the new weights.
"""

from collections.abc import Sequence
from math import exp

from kilat.policy.scale.config import ScaleConfig
from kilat.policy.scale.pressure import Needs, needs, quantile
from kilat.policy.scale.window import RoleWorker, Window

MEAN_REQUESTS, MEAN_S = 30, 10.0
"""Requests, and seconds at most, over which arrivals are averaged: prompts differ so much that the mean of a few says nothing, and a change of
the traffic is seen the sooner the more of it there is."""
GAIN = 1.05
"""How many times lower the pressure must become where it stays too high."""
STANDING_QUEUE = 0.25
"""Part of what all workers compute that must be needed, or late first tokens are the past."""
MOST_TIMES = 4
"""As many workers as there are, at once, where no bound is set."""

Weights = dict[str, tuple[float, float]]
PREFILL, BOTH = (1.0, 0.0), (1.0, 1.0)
"""What streams leave of the time of a worker that does both is in its speed already: its weights take nothing off again."""


class RoleScaler:
    """Decides once per window. A worker computes prompts only, or does both; at least one does both.

    ``wished``: how many workers would keep the targets, within ``least_workers`` and ``most_workers``; 0 before the first window.
    """

    def __init__(self, config: ScaleConfig) -> None:
        self.config = config
        self.wished = 0
        self._arrivals_per_s: float | None = None
        self._wish = 0
        self._n_windows = 0
        self._n_more = 0
        self._n_fewer = 0
        self._changed_s: float | None = None

    def on_window(self, window: Window, now_s: float) -> Weights | None:
        """New (prefill, decode) weights of the workers whose share changes, or None."""
        workers = [w for w in window.workers if not w.draining]
        if not workers:
            return None
        needed = needs(workers, self._mean_arrivals(window), window, self.config)
        self._wish_for(len(workers), needed, window)
        have = sum(w.decode_weight == 0 for w in workers)
        if have == len(workers) or needed is None or not needed.rate:
            # somebody died, or all were told to do one thing: a kind of work without a worker cannot wait for measurements
            return self._move(workers, min(have, len(workers) - 1), now_s)
        want = self._want(have, [p.worst for p in needed.pressures(len(workers), self.config)])
        wish = (want > have) - (want < have)
        self._n_windows = self._n_windows + 1 if wish == self._wish else 1
        self._wish = wish
        is_cool = self._changed_s is None or now_s - self._changed_s >= self.config.cool_down_s
        is_time = wish != 0 and self._n_windows >= self.config.patience and is_cool
        return self._move(workers, want if is_time else have, now_s)

    def _mean_arrivals(self, window: Window) -> float:
        """Prompt tokens per second."""
        per_s = sum(window.prompts) / window.seconds
        before = per_s if self._arrivals_per_s is None else self._arrivals_per_s
        kept = exp(-max(len(window.prompts) / MEAN_REQUESTS, window.seconds / MEAN_S))
        self._arrivals_per_s = per_s + kept * (before - per_s)
        return self._arrivals_per_s

    def _want(self, have: int, worst: Sequence[float]) -> int:
        """How many should compute prompts only, by the pressure with each number of them."""
        is_calm = worst[have] <= self.config.act_above
        fewest = next(
            (k for k, p in enumerate(worst) if p <= self.config.act_above / self.config.ratio), None
        )
        if fewest is not None:
            return min(fewest, have) if is_calm else fewest
        best = min(range(len(worst)), key=worst.__getitem__)
        return have if is_calm or worst[have] < GAIN * worst[best] else best

    def _move(self, workers: Sequence[RoleWorker], want: int, now_s: float) -> Weights | None:
        """Set apart those with the fewest sessions, bring back those with the shortest queue; whoever only decodes does both from now on."""
        apart = sorted(
            (w for w in workers if w.decode_weight == 0),
            key=lambda w: (w.queued_prompt_tokens, w.worker_id),
            reverse=True,
        )
        others = sorted((w for w in workers if w.decode_weight > 0), key=lambda w: (w.running, w.worker_id))
        changed = {w.worker_id: BOTH for w in apart[want:]}
        changed |= {w.worker_id: PREFILL for w in others[: max(want - len(apart), 0)]}
        changed |= {w.worker_id: BOTH for w in others if w.prefill_weight == 0 and w.worker_id not in changed}
        if not changed:
            return None
        self._changed_s, self._n_windows, self._wish = now_s, 0, 0
        return changed

    def _wish_for(self, n: int, needed: Needs | None, window: Window) -> None:
        """More workers after some windows in which no shares would do, fewer after many in which fewer would."""
        c = self.config
        want = self._enough(n, needed, window) if needed is not None else n
        want = min(max(want, c.least_workers), c.most_workers or want)
        self._n_more = self._n_more + 1 if want > n else 0
        self._n_fewer = self._n_fewer + 1 if want < n else 0
        if self._n_more >= c.patience:
            self.wished = want
        elif self._n_fewer >= c.fewer_after:
            self.wished, self._n_fewer = want, 0
        elif not self.wished or (not self._n_more and not self._n_fewer):
            self.wished = n

    def _enough(self, n: int, needed: Needs, window: Window) -> int:
        """How many workers keep the targets: one fewer than there are where that is plain, as many more as it takes where it is not. Where
        no number of them does, the fewest with which it is hardly worse than with the most."""
        c = self.config
        calm = c.act_above / c.ratio

        def least(m: int) -> float:
            return min(p.worst for p in needed.pressures(m, c))

        late = quantile(window.ttft_s, c.quantile) > c.ttft_slo_s
        waits = needed.prompt_tokens_per_s > STANDING_QUEUE * needed.rate * n
        if least(n) <= c.act_above and not (late and waits):
            return n - 1 if n > 1 and least(n - 1) <= calm else n
        most = max(c.most_workers or MOST_TIMES * n, n)
        enough = next((m for m in range(n + 1, most + 1) if least(m) <= calm), None)
        if enough is not None:
            return enough
        return max(next(m for m in range(1, most + 1) if least(m) <= GAIN * least(most)), n - 1)
