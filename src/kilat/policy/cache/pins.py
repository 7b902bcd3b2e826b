"""Pins: pages that belong to moves, not to sessions.

Pages that a peer will be read into, pages that a peer may read, and pages of a session that has left are all held in the same way: by a
count of pins per page. Who pinned what, and until when, is the business of whoever moves pages.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from kilat.base.errors import EngineError
from kilat.policy.cache.pool import PagePool


class Pins:
    """Ownerships of pages of ``pool`` that no table has. Not thread-safe.

    Pages of one chain should be unpinned in one call, from the chain's start: so the pool can evict its end first.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._count: Counter[int] = Counter()

    def __iter__(self) -> Iterator[int]:
        """Every page as often as it is pinned."""
        return self._count.elements()

    @property
    def n_pages(self) -> int:
        """Pages with a pin."""
        return len(self._count)

    def reserve(self, n_pages: int) -> list[int] | None:
        """Take ``n_pages`` pages of undefined content out of the pool; None, and nothing changed, when it has fewer to give."""
        if n_pages > self._pool.n_available:
            return None
        pages = [page for page in (self._pool.take() for _ in range(n_pages)) if page is not None]
        self._count.update(pages)
        return pages

    def pin(self, pages: Sequence[int]) -> None:
        """Add a pin to pages that are used or cached."""
        self._pool.share(pages)
        self._count.update(pages)

    def receive(self, pages: Sequence[int]) -> None:
        """Take over an ownership that the caller had."""
        self._count.update(pages)

    def give(self, pages: Sequence[int]) -> None:
        """Hand a pin of each page over to the caller, who owns the pages from now on. Raises EngineError when one has too few."""
        wanted = Counter(pages)
        for page, n in wanted.items():
            if self._count[page] < n:
                raise EngineError(f"page {page} is not pinned{' that often' if n > 1 else ''}")
        for page, n in wanted.items():
            self._count[page] -= n
            if not self._count[page]:
                del self._count[page]

    def unpin(self, pages: Sequence[int]) -> None:
        """Give pins back; a page without a name and without another owner becomes free. Raises EngineError, and nothing is changed."""
        self.give(pages)
        self._pool.release(pages)
