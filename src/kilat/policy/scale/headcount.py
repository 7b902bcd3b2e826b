"""Headcount: when workers are started and ended, from how many are wished for.

A wish is a guess of one moment, and a worker takes seconds to minutes to load: so a wish must last (``grow_after_s``) before workers are
started for it, all at once, for what they are wished for is there now. They are ended one by one, the wish lasting much longer before each
(``shrink_after_s``), for a worker too many costs less than one too few.
"""

from kilat.policy.scale.config import ScaleConfig


class Headcount:
    """Holds the number of workers to what is wished for, within ``least_workers`` and ``most_workers``. Decides and performs nothing."""

    def __init__(self, config: ScaleConfig) -> None:
        self.config = config
        self._way = 0
        self._since_s = 0.0

    def on_wish(self, wished: int, n: int, now_s: float) -> int:
        """How many workers to start, -1 to end one, or 0. ``wished``: 0 while nobody knows. ``n``: those that run or are being started, without
        those that are being ended."""
        c = self.config
        want = min(max(wished, c.least_workers), c.most_workers or wished) if wished else n
        way = (want > n) - (want < n)
        if way != self._way:
            self._way, self._since_s = way, now_s
        if way == 0 or now_s - self._since_s < (c.grow_after_s if way > 0 else c.shrink_after_s):
            return 0
        self._since_s = now_s
        return want - n if way > 0 else -1
