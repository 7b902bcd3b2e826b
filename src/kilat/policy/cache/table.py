"""PageTable: the pages of one session, and the hashes that name their content."""

from collections.abc import Sequence

from kilat.base.hashing import page_hash
from kilat.policy.cache.pool import PagePool


class PageTable:
    """Pages of a session's tokens, first token first. Append-only until it is released as a whole.

    ``pages`` may be handed out and read at any time; only this class appends to it. The first ``n_sealed`` pages have their hash.
    """

    __slots__ = ("_pool", "n_sealed", "pages")

    def __init__(self, pool: PagePool, shared: Sequence[int] = (), n_sealed: int = 0) -> None:
        pool.share(shared)
        self._pool = pool
        self.pages = list(shared)
        self.n_sealed = n_sealed

    def cover(self, n_tokens: int) -> int:
        """Append pages until ``n_tokens`` tokens have a place; returns how many of them have one, less when the pool runs out."""
        page_tokens = self._pool.page_tokens
        while len(self.pages) * page_tokens < n_tokens:
            page = self._pool.take()
            if page is None:
                return len(self.pages) * page_tokens
            self.pages.append(page)
        return n_tokens

    def seal(self, names: Sequence[bytes], n_pages: int) -> None:
        """Give the first ``n_pages`` pages, all full and computed, their hashes ``names``."""
        for i in range(self.n_sealed, n_pages):
            self._pool.seal(self.pages[i], names[i])
        self.n_sealed = max(self.n_sealed, n_pages)

    def fork(self, n_tokens: int) -> tuple["PageTable", list[tuple[int, int]]] | None:
        """A second table over the same first ``n_tokens`` tokens, and the page copies (source, destination) it needs.

        Full pages are shared; a partial last one gets a copy, because both sides will write behind it. None when the pool is out of
        pages; then nothing has changed.
        """
        n_full, n_rest = divmod(n_tokens, self._pool.page_tokens)
        copies = []
        if n_rest:
            page = self._pool.take()
            if page is None:
                return None
            copies.append((self.pages[n_full], page))
        twin = PageTable(self._pool, self.pages[:n_full], min(self.n_sealed, n_full))
        twin.pages += [page for _, page in copies]
        return twin, copies

    @classmethod
    def over(cls, pool: PagePool, pages: Sequence[int]) -> "PageTable":
        """A table that takes over one ownership of each of ``pages`` from whoever had it."""
        table = cls(pool)
        table.pages = list(pages)
        return table

    def surrender(self, n_pages: int) -> list[int]:
        """The first ``n_pages`` pages, whose ownership goes to the caller; the others are given back and the table is empty."""
        kept, rest = self.pages[:n_pages], self.pages[n_pages:]
        self._pool.release(rest)
        self.pages = []
        self.n_sealed = 0
        return kept

    def release(self) -> None:
        """Give all pages back. Lists handed out before keep their content: a plan that is still running may read one."""
        self.surrender(0)


def extend_chain(
    chain: list[bytes], root: bytes, token_ids: Sequence[int], page_tokens: int, n_pages: int
) -> None:
    """Append hashes to ``chain`` until it names the first ``n_pages`` full pages of ``token_ids``; ``root`` is the first's parent."""
    for i in range(len(chain), n_pages):
        parent = chain[-1] if chain else root
        chain.append(page_hash(parent, token_ids[i * page_tokens : (i + 1) * page_tokens]))
