"""Agenda: what happens when. Equal times keep the order in which they were asked for, so a run is a function of its seed."""

from collections.abc import Callable
from heapq import heappop, heappush

from kilat.base.errors import EngineError


class Agenda:
    """Virtual time in seconds and the calls that are due. Not thread-safe."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._n = 0

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Make ``call`` in ``delay_s`` seconds, 0 or more."""
        heappush(self._due, (self.now_s + max(delay_s, 0.0), self._n, call))
        self._n += 1

    def run(self, until_s: float, *, max_calls: int = 1_000_000) -> None:
        """Make all calls due up to ``until_s``; then it is that time. Raises EngineError after ``max_calls``, when something goes round
        in circles."""
        n_calls = 0
        while self._due and self._due[0][0] <= until_s:
            self.now_s, _, call = heappop(self._due)
            call()
            n_calls += 1
            if n_calls > max_calls:
                raise EngineError(
                    f"{max_calls:,} calls by {self.now_s:.3f} s of virtual time: no end in sight"
                )
        self.now_s = max(self.now_s, until_s)
