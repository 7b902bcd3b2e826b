"""What goes in and out of a scheduler with its pages: the data, and the check of pages that arrive."""

from dataclasses import dataclass

from kilat.base.errors import EngineError
from kilat.policy.cache.pool import PagePool
from kilat.wire.session import SessionRecord


@dataclass(frozen=True, slots=True)
class Arrived:
    """Pinned pages (reserved ones that were filled, or lent ones) with the KV of the first ``n_tokens`` tokens of prompt and output of a
    session, in the order of its tokens. The last page may be partial."""

    pages: list[int]
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Departed:
    """A session that has left: ``record`` goes on elsewhere; ``pages``, pinned here, hold the KV of its first ``n_tokens`` tokens."""

    record: SessionRecord
    pages: list[int]
    n_tokens: int


def usable(arrived: Arrived, n_known: int, pool: PagePool) -> tuple[int, int]:
    """(tokens, pages) that a session of ``n_known`` tokens can take of ``arrived``. Raises EngineError for too few pages, or a page twice.

    The last known token is always computed by a row of its own, and a session writes only pages that nobody else sees: a last page that
    is shared or can be found by its name is not taken unless it is full.
    """
    pages, page_tokens = arrived.pages, pool.page_tokens
    if len(set(pages)) != len(pages) or not 0 <= arrived.n_tokens <= len(pages) * page_tokens:
        raise EngineError(f"{len(pages)} arrived pages cannot hold {arrived.n_tokens:,} tokens")
    n_tokens = min(arrived.n_tokens, n_known - 1)
    n_full = n_tokens // page_tokens
    n_private = n_full
    while n_private < len(pages) and pool.is_private(pages[n_private]):
        n_private += 1
    if n_private == n_full:
        return n_full * page_tokens, n_full
    return n_tokens, n_private
