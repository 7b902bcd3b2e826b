"""Tiers: whether pages that left the pool are brought back or computed again. Decides by measured times; reads no page itself.

A tier keeps pages by their content hash, so what is true of names in the pool is true here: they start from the model and the tenant's
salt, and one tenant's pages are never found by another's prompt.
"""

from collections.abc import Iterable, Mapping, Sequence

WEIGHT = 0.2
"""Of the newest measurement in a moving average."""

FORGET = 0.02
"""Of the way back to the first guess, each time that a tier is passed over: a disk that was busy once is tried again some time."""

START_S = 0.001
"""From the decision to the first byte, and from the last one to the next step."""


class TierRates:
    """Seconds to read a page by tier. ``guesses`` hold until there are measurements."""

    def __init__(self, guesses: Mapping[str, float]) -> None:
        self._guess_s = dict(guesses)
        self._page_s = dict(guesses)

    def page_s(self, tier: str) -> float:
        return self._page_s[tier]

    def measured(self, tier: str, n_pages: int, seconds: float) -> None:
        """``n_pages`` were read in ``seconds``."""
        if n_pages > 0 and seconds > 0:
            self._page_s[tier] += WEIGHT * (seconds / n_pages - self._page_s[tier])

    def seconds(self, tiers: Iterable[str]) -> float:
        """To read pages that are in these tiers."""
        return sum(self._page_s[tier] for tier in tiers)

    def n_worth_reading(
        self, tiers: Sequence[str], page_compute_s: float | None, queue_s: float = 0.0
    ) -> int:
        """How many pages of a chain to bring back, from its first on. ``tiers`` says where each is, ``page_compute_s`` what computing one
        takes (None: not known yet, then reading them will tell what that takes), ``queue_s`` how long other reads go first."""
        if page_compute_s is None:
            return len(tiers)
        best, best_s, saved_s = 0, 0.0, -START_S - queue_s
        for i, tier in enumerate(tiers):
            saved_s += page_compute_s - self._page_s[tier]
            if saved_s > best_s:
                best, best_s = i + 1, saved_s
        for tier in set(tiers[best:]):
            self._page_s[tier] += FORGET * (self._guess_s[tier] - self._page_s[tier])
        return best
