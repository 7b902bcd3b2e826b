"""Owners, content and eviction of single pages."""

import pytest

from kilat.base.errors import EngineError
from kilat.policy.cache.pool import PagePool

pytestmark = pytest.mark.logic


def taken(pool: PagePool, n: int) -> list[int]:
    pages = [pool.take() for _ in range(n)]
    assert None not in pages
    return pages


def sealed_chain(pool: PagePool, *names: bytes) -> list[int]:
    """A used chain of pages with these hashes."""
    pages = taken(pool, len(names))
    for page, name in zip(pages, names):
        pool.seal(page, name)
    return pages


def numbers(pool: PagePool) -> tuple[int, int, int]:
    return pool.n_free, pool.n_used, pool.n_cached


def test_taken_pages_are_distinct_until_the_pool_is_empty():
    pool = PagePool(5, 4)
    assert sorted(taken(pool, 5)) == [0, 1, 2, 3, 4]
    assert pool.take() is None
    assert numbers(pool) == (0, 5, 0)


def test_released_page_without_hash_is_free_again():
    pool = PagePool(1, 4)
    [page] = taken(pool, 1)
    pool.release([page])
    assert numbers(pool) == (1, 0, 0)
    assert pool.take() == page


def test_shared_page_stays_used_until_its_last_owner_releases_it():
    pool = PagePool(2, 4)
    [page] = taken(pool, 1)
    pool.share([page])
    pool.release([page])
    assert numbers(pool) == (1, 1, 0)
    pool.check([[page]])
    pool.release([page])
    assert numbers(pool) == (2, 0, 0)


def test_sealed_page_is_found_by_hash_while_used_and_after():
    pool = PagePool(2, 4)
    pages = sealed_chain(pool, b"a")
    assert pool.match([b"a"]) == pages
    pool.release(pages)
    assert numbers(pool) == (1, 0, 1)
    assert pool.match([b"a"]) == pages


def test_match_ends_at_the_first_unknown_hash():
    pool = PagePool(4, 4)
    a, b, c = sealed_chain(pool, b"a", b"b", b"c")
    assert pool.match([b"a", b"b", b"x", b"c"]) == [a, b]
    assert pool.match([b"x", b"a"]) == []
    assert pool.match([]) == []
    pool.check([[a, b, c]])


def test_match_changes_nothing():
    pool = PagePool(2, 4)
    first = sealed_chain(pool, b"a")
    second = sealed_chain(pool, b"b")
    pool.release(first)
    pool.release(second)
    pool.match([b"a"])
    assert pool.take() == first[0]  # still the least recently used


def test_sharing_a_cached_page_makes_it_used():
    pool = PagePool(1, 4)
    [page] = sealed_chain(pool, b"a")
    pool.release([page])
    assert pool.n_cached_of([page]) == 1
    pool.share([page])
    assert numbers(pool) == (0, 1, 0)
    assert pool.n_cached_of([page]) == 0
    assert pool.take() is None
    pool.check([[page]])


def test_free_pages_go_before_cached_pages():
    pool = PagePool(2, 4)
    [page] = sealed_chain(pool, b"a")
    pool.release([page])
    assert pool.n_available == 2
    assert pool.take() != page
    assert pool.match([b"a"]) == [page]


def test_evicted_page_is_not_found_any_more():
    pool = PagePool(1, 4)
    pages = sealed_chain(pool, b"a")
    pool.release(pages)
    assert pool.take() == pages[0]
    assert pool.match([b"a"]) == []
    pool.check([pages])


def test_least_recently_released_chain_is_evicted_first():
    pool = PagePool(2, 4)
    old, new = sealed_chain(pool, b"old"), sealed_chain(pool, b"new")
    pool.release(old)
    pool.release(new)
    pool.share(old)
    pool.release(old)  # used again: now the newest
    assert pool.take() == new[0]


def test_leaves_of_a_chain_are_evicted_before_their_parents():
    pool = PagePool(3, 4)
    a, b, c = sealed_chain(pool, b"a", b"ab", b"abc")
    pool.release([a, b, c])
    assert [pool.take(), pool.take(), pool.take()] == [c, b, a]


def test_parent_that_was_shared_longer_outlives_the_leaves_of_both_chains():
    pool = PagePool(4, 4)
    a, b, c = sealed_chain(pool, b"a", b"ab", b"abc")
    pool.share([a])
    [d] = sealed_chain(pool, b"ad")
    pool.release([a, b, c])
    pool.release([a, d])
    assert [pool.take() for _ in range(4)] == [c, b, d, a]


def test_second_page_with_the_same_content_is_not_in_the_index():
    pool = PagePool(2, 4)
    [first] = sealed_chain(pool, b"a")
    [second] = sealed_chain(pool, b"a")
    assert pool.match([b"a"]) == [first]
    pool.release([second])
    assert numbers(pool) == (1, 1, 0)
    assert pool.match([b"a"]) == [first]


def test_twin_takes_the_place_of_the_first_page_when_that_is_released():
    pool = PagePool(2, 4)
    [first] = sealed_chain(pool, b"a")
    [second] = sealed_chain(pool, b"a")
    pool.release([first])
    assert pool.match([b"a"]) == [second]
    assert numbers(pool) == (1, 1, 0)
    pool.release([second])
    assert numbers(pool) == (1, 0, 1)
    pool.check([])


def test_used_page_replaces_a_cached_page_of_the_same_content():
    pool = PagePool(2, 4)
    [old] = sealed_chain(pool, b"a")
    pool.release([old])
    [new] = sealed_chain(pool, b"a")
    assert pool.match([b"a"]) == [new]
    assert numbers(pool) == (1, 1, 0)
    pool.check([[new]])


def test_parent_of_a_used_page_is_never_evicted_even_when_computed_twice():
    pool = PagePool(4, 4)
    a, b = sealed_chain(pool, b"a", b"ab")
    again, child = sealed_chain(pool, b"a", b"ac")  # computed without a look at the index
    pool.release([a, b])
    taken(pool, 2)
    assert pool.match([b"a", b"ac"]) == [again, child]


def test_sealing_twice_changes_nothing():
    pool = PagePool(2, 4)
    [page] = sealed_chain(pool, b"a")
    pool.share([page])
    pool.seal(page, b"a")
    pool.check([[page], [page]])


@pytest.mark.parametrize("tables", [[], [[0], [0]], [[0, 1]], [[1]], [[0, 9]]])
def test_check_notices_owners_that_do_not_match(tables: list[list[int]]):
    pool = PagePool(2, 4)
    assert taken(pool, 1) == [0]
    pool.check([[0]])
    with pytest.raises(EngineError, match="page"):
        pool.check(tables)


def test_check_notices_a_page_released_once_too_often():
    pool = PagePool(3, 4)
    [page] = taken(pool, 1)
    pool.share([page])
    pool.release([page])
    pool.release([page])
    with pytest.raises(EngineError):
        pool.check([[page]])
