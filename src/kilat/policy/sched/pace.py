"""Pace: what measured steps say about the next one. Seconds come in as arguments; there is no clock here."""

WEIGHT = 0.2
"""Of the newest measurement in a moving average."""

SLOPE_WEIGHT = 0.5
"""The same for the cost of a prefill token, which grows with every chunk of a long prompt."""

MARGIN = 0.88
"""Of the target that a step aims at: steps scatter around their forecast, and beyond it each token costs more (on an H200 64 rows of decode
and 448, 576, 704 tokens of a prompt took 12.5, 17.8, 20 to 22 ms)."""

FIRST_TOKENS = 256
"""Prefill tokens beside decode rows before anything is measured."""

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


class Pace:
    """Moving averages: the seconds of a step of decode rows, the seconds that a prefill token adds to one, and the seconds between two
    finished sessions. ``s_per_token`` is what a token of a step with prefill work costs, decode rows included."""

    def __init__(self, target_step_s: float | None, token_multiple: int = 1) -> None:
        self.target_step_s = target_step_s
        self.token_multiple = token_multiple
        self.s_per_token: float | None = None
        self.finish_every_s: float | None = None
        self._decode_s: float | None = None
        self._prefill_s_per_token: float | None = None
        self._usual_prefill = 0.0
        self._last_commit_s: float | None = None
        self._last_finish_s: float | None = None

    def prefill_tokens(self, n_decode: int, n_left: int, page_tokens: int) -> int:
        """Tokens of prefill for a step with ``n_decode`` decode rows and ``n_left`` tokens of budget: what the target leaves,
        all tokens together a multiple of ``token_multiple`` if that costs less than half of them, at most twice of what was measured lately, never below one page, so that
        prompts always make progress. Without a stream to protect the budget alone decides."""
        if self.target_step_s is None or n_decode == 0:
            return n_left
        share = FIRST_TOKENS
        if self._prefill_s_per_token is not None:
            left_s = MARGIN * self.target_step_s - (self._decode_s or 0.0)
            share = min(int(left_s / self._prefill_s_per_token), int(2 * self._usual_prefill))
        rounded = share - (share + n_decode) % self.token_multiple
        # where rounding would take most of the share, a size that fits less well is the smaller loss
        return min(n_left, max(rounded if 2 * rounded >= share else share, page_tokens))

    def stepped(self, planned_s: float, now_s: float, n_decode: int, n_prefill: int) -> None:
        """A step of that many tokens, planned at ``planned_s``, is committed. It began when it was planned or when the step before ended,
        whichever is later."""
        begin_s = planned_s if self._last_commit_s is None else max(planned_s, self._last_commit_s)
        self._last_commit_s = now_s
        seconds = now_s - begin_s
        if seconds <= 0:
            return
        if n_prefill == 0:
            self._decode_s = _mix(self._decode_s, seconds, WEIGHT)
            return
        self.s_per_token = _mix(self.s_per_token, seconds / (n_decode + n_prefill), WEIGHT)
        self._usual_prefill = max(n_prefill, 0.7 * self._usual_prefill)
        decode_s = min(self._decode_s or 0.0, 0.9 * seconds) if n_decode else 0.0
        cost = (seconds - decode_s) / n_prefill
        # few tokens say little about the cost of one: what they add is lost in what steps are late by. None is early by chance.
        known = self._prefill_s_per_token
        if known is not None and cost < known / 2:
            weight = 1.0  # what was known was something else: kernels were compiled, or a few tokens' step came late
        elif known is not None and cost < known:
            weight = SLOPE_WEIGHT
        else:
            weight = SLOPE_WEIGHT * n_prefill / self._usual_prefill
        self._prefill_s_per_token = _mix(self._prefill_s_per_token, cost, weight)

    def finished(self, n: int, now_s: float) -> None:
        """``n`` sessions have finished since the last call."""
        if self._last_finish_s is not None:
            self.finish_every_s = _mix(self.finish_every_s, max(now_s - self._last_finish_s, 0.0) / n, WEIGHT)
        self._last_finish_s = now_s

    def retry_after_s(self, n_waiting: int) -> float:
        """When a client that found the queue full should come back: the time in which half of the queue is served."""
        seconds = (self.finish_every_s or 0.0) * n_waiting / 2
        return min(max(seconds, MIN_RETRY_S), MAX_RETRY_S)


def _mix(mean: float | None, value: float, weight: float) -> float:
    return value if mean is None else mean + weight * (value - mean)
