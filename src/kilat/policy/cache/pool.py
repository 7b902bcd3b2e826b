"""PagePool: who owns which page, which pages can be found by content, and which one is evicted next.

A page is in exactly one of three states:

    free     no owner, content means nothing
    used     one or more owners (a count); with a hash or without
    cached   no owner, but its content can still be found by hash; evicted when the free pages run out

A page gets its hash (``seal``) when it is full and computed; from then on its content must never change. At most one page per hash
is in the index; another used page with the same content is a twin: it waits to take the place of the first when that one loses its
last owner. So the content of a used page is always found in a used page, and a cached page never stands above a used one in a chain.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kilat.base.errors import EngineError
from kilat.policy.cache.changes import PageChanges


class PagePool:
    """Owners and content of ``n_pages`` pages of ``page_tokens`` tokens. Pure bookkeeping; not thread-safe.

    Owners release the pages of a chain together (``release`` goes from its end to its start), so the least recently used cached
    page is always a leaf: its children are older and were evicted before. ``changes``, when somebody sets it, hears of every name that
    enters or leaves the index; ``on_evict``, of every cached page (name, page) that is about to get an owner who may write it.
    """

    def __init__(self, n_pages: int, page_tokens: int) -> None:
        self.n_pages = n_pages
        self.page_tokens = page_tokens
        self._free = list(range(n_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._n_owners = [0] * n_pages
        self._index: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._twins: dict[bytes, list[int]] = {}
        self.changes: PageChanges | None = None
        self.on_evict: Callable[[bytes, int], None] | None = None

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_cached(self) -> int:
        return len(self._cached)

    @property
    def n_used(self) -> int:
        return self.n_pages - len(self._free) - len(self._cached)

    @property
    def n_available(self) -> int:
        """Pages that :meth:`take` can still give out: free ones, then cached ones."""
        return len(self._free) + len(self._cached)

    def take(self) -> int | None:
        """A page for one new owner, its content undefined; None when every page is used. May evict one cached page."""
        if self._free:
            page = self._free.pop()
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            name = self._hash_of.pop(page)
            del self._index[name]
            if self.changes is not None:
                self.changes.drop(name)
            if self.on_evict is not None:
                self.on_evict(name, page)
        else:
            return None
        self._n_owners[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Add an owner to each of ``pages``, which must be used or cached."""
        for page in pages:
            if self._n_owners[page] == 0:
                del self._cached[page]
            self._n_owners[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Take an owner from each page of a chain, given from its start."""
        for page in reversed(pages):
            self._n_owners[page] -= 1
            if self._n_owners[page] == 0:
                self._orphaned(page)

    def _orphaned(self, page: int) -> None:
        name = self._hash_of.get(page)
        if name is None:
            self._free.append(page)
            return
        twins = self._twins.get(name, [])
        if self._index[name] == page and not twins:
            self._cached[page] = None
            return
        if self._index[name] == page:
            self._index[name] = twins.pop(0)
        else:
            twins.remove(page)
        if not twins:
            self._twins.pop(name, None)
        del self._hash_of[page]
        self._free.append(page)

    def seal(self, page: int, name: bytes) -> None:
        """Say that used ``page`` is full, computed and has content hash ``name``. Sealing it again changes nothing."""
        if page in self._hash_of:
            return
        holder = self._index.get(name)
        if holder is not None and self._n_owners[holder] > 0:
            self._twins.setdefault(name, []).append(page)
        else:
            if holder is not None:
                # the same content without an owner: the new page is used anyway, so the old one becomes free
                del self._cached[holder]
                del self._hash_of[holder]
                self._free.append(holder)
            elif self.changes is not None:
                self.changes.store(name)
            self._index[name] = page
        self._hash_of[page] = name

    def match(self, names: Sequence[bytes]) -> list[int]:
        """Pages that hold the longest known start of a chain of hashes. Changes nothing: ``share`` them before the next ``take``."""
        pages = []
        for name in names:
            page = self._index.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def names(self) -> list[bytes]:
        """All names that can be found, in no order."""
        return list(self._index)

    def is_private(self, page: int) -> bool:
        """Whether used ``page`` has one owner and no hash: its owner may write it."""
        return self._n_owners[page] == 1 and page not in self._hash_of

    def n_cached_of(self, pages: Iterable[int]) -> int:
        """How many of ``pages`` have no owner: sharing them takes that many from :attr:`n_available`."""
        return sum(1 for page in pages if self._n_owners[page] == 0)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise EngineError if an invariant is broken. ``tables`` are the page lists of all owners."""
        owners = Counter(page for table in tables for page in table)
        for page in range(self.n_pages):
            _expect(self._n_owners[page] == owners[page], f"page {page}: owners miscounted")
        _expect(all(0 <= page < self.n_pages for page in owners), "a table names a page that does not exist")
        free, cached = set(self._free), set(self._cached)
        used = {page for page, n in enumerate(self._n_owners) if n}
        _expect(len(free) == len(self._free), "a page is free twice")
        _expect(not (free & cached or free & used or cached & used), "a page is in two states")
        _expect(len(free) + len(cached) + len(used) == self.n_pages, "free + cached + used is not all pages")
        self._check_index(free, cached, used)

    def _check_index(self, free: set[int], cached: set[int], used: set[int]) -> None:
        hashed = set(self._hash_of)
        _expect(not hashed & free, "a free page has a hash")
        _expect(cached <= hashed, "a cached page has no hash")
        for name, page in self._index.items():
            _expect(self._hash_of.get(page) == name, f"page {page}: index and hash differ")
        twins = [page for pages in self._twins.values() for page in pages]
        _expect(
            sorted([*twins, *self._index.values()]) == sorted(hashed),
            "a hashed page is neither in the index nor a twin",
        )
        for name, pages in self._twins.items():
            _expect(bool(pages), "an empty list of twins")
            _expect({self._index[name], *pages} <= used, "a twin or its original has no owner")
            _expect(all(self._hash_of[page] == name for page in pages), "a twin has another hash")


def _expect(holds: bool, broken: str) -> None:
    if not holds:
        raise EngineError(f"page pool: {broken}")
