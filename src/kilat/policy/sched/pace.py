"""Pace: what measured steps say about the next one. Seconds come in as arguments; there is no clock here."""

WEIGHT = 0.2
"""Of the newest measurement in a moving average."""

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


class Pace:
    """Moving averages of the seconds per token of steps with prefill work, and of the seconds between two finished sessions."""

    def __init__(self, target_step_s: float | None, token_multiple: int = 1) -> None:
        self.target_step_s = target_step_s
        self.token_multiple = token_multiple
        self.s_per_token: float | None = None
        self.finish_every_s: float | None = None
        self._last_commit_s: float | None = None
        self._last_finish_s: float | None = None

    def prefill_tokens(self, n_decode: int, n_left: int, page_tokens: int) -> int:
        """Tokens of prefill for a step with ``n_decode`` decode rows and ``n_left`` tokens of budget: what the target leaves,
        all tokens together a multiple of ``token_multiple``, never below one page, so that prompts always make progress. Without a stream to protect the budget alone decides."""
        if self.target_step_s is None or self.s_per_token is None or n_decode == 0:
            return n_left
        total = int(self.target_step_s / self.s_per_token)
        share = total - total % self.token_multiple - n_decode
        return min(n_left, max(share, page_tokens))

    def stepped(self, planned_s: float, now_s: float, n_tokens: int, *, prefill: bool) -> None:
        """A step of ``n_tokens`` that was planned at ``planned_s`` is committed. It began when it was planned or when the step before
        ended, whichever is later. Steps of decode rows only say little about prefill tokens and do not count."""
        begin_s = planned_s if self._last_commit_s is None else max(planned_s, self._last_commit_s)
        self._last_commit_s = now_s
        if prefill and now_s > begin_s:
            self.s_per_token = _mix(self.s_per_token, (now_s - begin_s) / n_tokens)

    def finished(self, n: int, now_s: float) -> None:
        """``n`` sessions have finished since the last call."""
        if self._last_finish_s is not None:
            self.finish_every_s = _mix(self.finish_every_s, max(now_s - self._last_finish_s, 0.0) / n)
        self._last_finish_s = now_s

    def retry_after_s(self, n_waiting: int) -> float:
        """When a client that found the queue full should come back: the time in which half of the queue is served."""
        seconds = (self.finish_every_s or 0.0) * n_waiting / 2
        return min(max(seconds, MIN_RETRY_S), MAX_RETRY_S)


def _mix(mean: float | None, value: float) -> float:
    return value if mean is None else mean + WEIGHT * (value - mean)
