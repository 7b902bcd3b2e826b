"""Costs: seconds that a choice takes, out of measured rates."""

from collections.abc import Sequence
from dataclasses import dataclass

from kilat.policy.route.config import RouterConfig
from kilat.policy.route.views import RouteRequest, WorkerView

KEPT = 0.97
"""Of the weight of older moves, with each new one."""
STAY = 0.001
"""How much the last start counts, beside all moves."""

AIM = 0.88
"""Part of their target that steps with a chunk of a prompt take, as a rule (``MARGIN`` of policy/sched)."""

UNKNOWN_TOKENS_PER_S = 1000.0
UNKNOWN_STEP_S = 0.05
LEAST_ROOM = 0.05
"""Part of a worker's time that a prompt gets however many sessions decode there."""


class LinkRate:
    """Seconds to read pages from a peer, from what moves have taken: a start, in which both sides may have to end a step, and each page.

    The two are those that explain all moves best: least squares of what they are wrong by, newer moves counting more, nothing below 0. So
    a move of one page, nearly all of it a start, does not make pages dear. While all moves are alike the start stays what it was.
    """

    def __init__(self, move_s: float, page_move_s: float) -> None:
        self.move_s = move_s
        self.page_move_s = page_move_s
        self._sums = [0.0] * 5

    def measured(self, n_pages: int, seconds: float) -> None:
        """A move of ``n_pages`` took ``seconds`` from the request for it to its end."""
        if n_pages <= 0 or seconds <= 0:
            return
        weight = 1 / seconds
        news = (weight, weight * n_pages, weight * n_pages**2, 1.0, n_pages)
        self._sums = [KEPT * old + new for old, new in zip(self._sums, news)]
        n, pages, squares, time, products = self._sums
        time += STAY * n * self.move_s
        n += STAY * n
        apart = n * squares - pages**2
        self.move_s = max((time * squares - pages * products) / apart, 0.0)
        self.page_move_s = max((products - pages * self.move_s) / squares, 0.0)
        if not self.page_move_s:
            self.move_s = time / n

    def seconds(self, n_pages: int) -> float:
        return self.move_s + n_pages * self.page_move_s if n_pages else 0.0


@dataclass(frozen=True, slots=True)
class Prefill:
    """What the prompt costs on one worker: ``n_held`` pages are there, ``n_lent`` of the chain come from ``lend_from``, ``n_left``
    tokens are computed. ``total_s`` is what choices are compared by: queue and computing by role share, and what it costs those
    who decode there."""

    n_held: int
    n_lent: int
    lend_from: str | None
    n_left: int
    queue_s: float
    move_s: float
    compute_s: float
    total_s: float


class Costs:
    """Costs of one request on each of ``workers``. Rates that are not known count as the mean of the known ones."""

    def __init__(
        self, config: RouterConfig, link: LinkRate, request: RouteRequest, workers: Sequence[WorkerView]
    ) -> None:
        self.config = config
        self.link = link
        self.request = request
        self._mean_rate = _mean([w.prefill_tokens_per_s for w in workers], UNKNOWN_TOKENS_PER_S)
        self._mean_step_s = _mean([w.step_s for w in workers], UNKNOWN_STEP_S)

    def prefill(self, w: WorkerView, n_held: int, peer: str | None, n_peer: int) -> Prefill:
        """On ``w``, which holds ``n_held`` pages, while ``peer`` holds ``n_peer`` and could lend them."""
        r = self.request
        rate = (w.prefill_tokens_per_s or self._mean_rate) * self._room(w)
        n_lent, lend_from, move_s = 0, None, 0.0
        if peer is not None and n_peer > n_held:
            fetch_s = self.link.seconds(n_peer - n_held)
            if fetch_s * self.config.move_margin < (n_peer - n_held) * r.page_tokens / rate:
                n_lent, lend_from, move_s = n_peer, peer, fetch_s
        n_left = max(r.n_prompt - max(n_held, n_lent) * r.page_tokens, 1)
        queue_s, compute_s = w.queued_prompt_tokens / rate, n_left / rate
        # a prompt for which a worker without the role was let through counts as if it had it
        total_s = (queue_s + compute_s) / (w.prefill_weight or 1.0) + move_s
        if n_left > self.config.local_prompt_tokens and self.config.target_step_s is None:
            total_s += compute_s * self.config.stall_share * w.running
        return Prefill(n_held, n_lent, lend_from, n_left, queue_s, move_s, compute_s, total_s)

    def _room(self, w: WorkerView) -> float:
        """Part of a worker's time that prompts get, where steps keep to a target while sessions decode."""
        if self.config.target_step_s is None or not w.running:
            return 1.0
        return max(1 - (w.step_s or self._mean_step_s) / (AIM * self.config.target_step_s), LEAST_ROOM)

    def decode_s(self, w: WorkerView) -> float:
        """What one more session costs on ``w``, by the sessions it has and its role share."""
        step_s = w.step_s or self._mean_step_s
        n = w.running + w.waiting
        if w.max_running and n >= w.max_running:
            n += n - w.max_running + w.max_running // 2  # it would wait for a place
        return (n + 1) * self.config.session_steps * step_s / (w.decode_weight or 1.0)

    def too_short_to_move(self, w: WorkerView) -> bool:
        """Whether the answer is so short that it should be written by ``w``, beside prompts: where steps keep to a target, because its few
        tokens could not make up for the time of a move, else because moving takes longer than writing all of them."""
        n, target_s = self.request.n_answer, self.config.target_step_s
        if n is None or n > self.config.short_answer_tokens:
            return False
        spare_s = (n - 1) * (1 - AIM) * target_s if target_s else n * (w.step_s or self._mean_step_s)
        return spare_s < self.hand_over_s(0)

    def hand_over_s(self, n_held: int) -> float:
        """Moving the prompt's pages to a decode worker that holds ``n_held`` of them."""
        n_pages = -(-self.request.n_prompt // self.request.page_tokens)
        return self.link.seconds(max(n_pages - n_held, 1))


def _mean(values: Sequence[float], unknown: float) -> float:
    known = [v for v in values if v > 0]
    return sum(known) / len(known) if known else unknown
