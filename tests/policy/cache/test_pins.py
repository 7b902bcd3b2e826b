"""Pages that moves own: reserved, pinned, taken over and given back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.base.errors import EngineError
from kilat.policy.cache.pins import Pins
from kilat.policy.cache.pool import PagePool
from kilat.policy.cache.table import PageTable

pytestmark = pytest.mark.logic


def fresh(n_pages: int = 4) -> tuple[PagePool, Pins]:
    pool = PagePool(n_pages, 2)
    return pool, Pins(pool)


def test_reserved_pages_are_used_until_they_are_unpinned():
    pool, pins = fresh()
    pages = pins.reserve(3)
    assert (len(set(pages)), pool.n_used, pool.n_free, pins.n_pages) == (3, 3, 1, 3)
    pool.check([list(pins)])
    pins.unpin(pages)
    assert (pool.n_free, pins.n_pages, list(pins)) == (4, 0, [])


def test_more_pages_than_there_are_reserve_nothing():
    pool, pins = fresh()
    assert pins.reserve(5) is None
    assert (pool.n_free, pins.n_pages) == (4, 0)


def test_reserving_evicts_cached_pages():
    pool, pins = fresh()
    page = pool.take()
    pool.seal(page, b"x")
    pool.release([page])
    assert len(pins.reserve(4)) == 4
    assert pool.match([b"x"]) == []


def test_reserving_nothing_is_an_empty_list_even_in_a_full_pool():
    _, pins = fresh()
    pins.reserve(4)
    assert pins.reserve(0) == []


def test_a_pinned_page_outlives_its_session():
    pool, pins = fresh()
    table = PageTable(pool)
    table.cover(4)
    pages = list(table.pages)
    pins.pin(pages)
    table.release()
    assert pool.n_used == 2
    pins.unpin(pages)
    assert pool.n_free == 4


def test_each_pin_must_be_given_back():
    pool, pins = fresh()
    pages = pins.reserve(2)
    pins.pin(pages[:1])
    pins.unpin(pages)
    assert (pool.n_used, list(pins)) == (1, pages[:1])
    pins.unpin(pages[:1])
    assert pool.n_used == 0


def test_a_page_without_pin_cannot_be_unpinned_and_nothing_changes():
    pool, pins = fresh()
    pages = pins.reserve(2)
    for wrong in ([*pages, 9], [pages[0], pages[0]]):
        with pytest.raises(EngineError, match="is not pinned"):
            pins.unpin(wrong)
    assert sorted(pins) == sorted(pages)
    pool.check([list(pins)])


def test_given_pages_keep_their_owner_count():
    pool, pins = fresh()
    pages = pins.reserve(2)
    pins.give(pages)
    table = PageTable.over(pool, pages)
    pool.check([table.pages, list(pins)])
    pins.receive(table.surrender(1))
    pool.check([list(pins)])
    assert list(pins) == pages[:1]
    assert pool.n_free == 3


@given(st.lists(st.tuples(st.sampled_from(["reserve", "pin", "unpin"]), st.integers(0, 5)), max_size=30))
def test_books_balance_whatever_happens(steps: list[tuple[str, int]]):
    pool, pins = fresh(6)
    held: list[list[int]] = []
    for what, n in steps:
        if what == "reserve":
            pages = pins.reserve(n)
            assert (pages is None) == (n > 6 - len({p for h in held for p in h}))
            held += [pages] if pages else []
        elif what == "pin" and held:
            pins.pin(held[n % len(held)])
            held.append(list(held[n % len(held)]))
        elif held:
            pins.unpin(held.pop(n % len(held)))
        pool.check([list(pins)])
        assert sorted(pins) == sorted(p for h in held for p in h)
