"""Rhythm: when the step that a worker runs will end, as far as it can be heard from the news of those before. Pure: time is an argument."""

from collections import deque
from statistics import median

KEPT = 5
"""Steps whose lengths count."""
SILENT = 3.0
"""Steps without news after which nothing can be said."""


class Rhythm:
    """The ends of one worker's steps. Seconds of any one clock."""

    def __init__(self) -> None:
        self._step = 0
        self._end_s: float | None = None
        self._lengths: deque[float] = deque(maxlen=KEPT)

    def stepped(self, step: int, now_s: float) -> None:
        """News of step number ``step`` have come. More news of it say nothing new."""
        n = step - self._step
        if n <= 0:
            return
        if self._end_s is not None:
            self._lengths.append((now_s - self._end_s) / n)
        self._step, self._end_s = step, now_s

    @property
    def step_s(self) -> float:
        """How long a step takes; 0 while not known."""
        return median(self._lengths) if self._lengths else 0.0

    def next_end_s(self, now_s: float) -> float | None:
        """When the step that runs at ``now_s`` ends, at the earliest now; None when none seems to run, or a long one."""
        step_s = self.step_s
        if self._end_s is None or step_s <= 0 or now_s - self._end_s > SILENT * step_s:
            return None
        return max(self._end_s + step_s, now_s)
