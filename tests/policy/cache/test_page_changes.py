"""News of the index: net changes between two looks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.policy.cache.changes import PageChanges
from kilat.policy.cache.pool import PagePool

pytestmark = pytest.mark.logic


def cached(pool: PagePool, name: bytes) -> int:
    page = pool.take()
    pool.seal(page, name)
    pool.release([page])
    return page


def test_nothing_is_collected_unless_asked():
    pool = PagePool(2, 4)
    cached(pool, b"a")
    assert pool.changes is None
    assert pool.names() == [b"a"]


def test_sealed_pages_are_stored_and_evicted_ones_dropped():
    pool = PagePool(1, 4)
    pool.changes = PageChanges()
    cached(pool, b"a")
    assert pool.changes.take() == ([b"a"], [])
    assert not pool.changes
    cached(pool, b"b")
    assert pool.changes
    assert pool.changes.take() == ([b"b"], [b"a"])
    assert pool.changes.take() == ([], [])


def test_a_page_that_came_and_went_between_two_looks_is_no_news():
    pool = PagePool(1, 4)
    pool.changes = PageChanges()
    cached(pool, b"a")
    cached(pool, b"b")
    assert pool.changes.take() == ([b"b"], [])
    cached(pool, b"a")
    cached(pool, b"b")
    assert pool.changes.take() == ([], [])


def test_a_twin_or_a_page_in_place_of_a_cached_one_is_no_news():
    pool = PagePool(3, 4)
    pool.changes = PageChanges()
    cached(pool, b"a")
    pool.changes.take()
    first, second = pool.take(), pool.take()
    pool.seal(first, b"a")  # in place of the cached one
    pool.seal(second, b"a")
    pool.release([first])
    pool.release([second])
    assert pool.changes.take() == ([], [])
    assert pool.names() == [b"a"]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans())))
def test_changes_add_up_to_the_set(steps: list[tuple[int, bool, bool]]):
    changes, truth, told = PageChanges(), set(), set()
    for i, come, look in steps:
        name = bytes([i])
        if come and name not in truth:
            truth.add(name)
            changes.store(name)
        elif not come and name in truth:
            truth.remove(name)
            changes.drop(name)
        if look:
            assert bool(changes) == (truth != told)
            stored, dropped = changes.take()
            assert not told.intersection(stored) and told.issuperset(dropped)
            told = (told | set(stored)) - set(dropped)
            assert told == truth
