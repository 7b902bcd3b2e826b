"""The pages of one session: growth, hashes, forks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.base.hashing import page_hash, root_hash
from kilat.policy.cache.pool import PagePool
from kilat.policy.cache.table import PageTable, extend_chain

pytestmark = pytest.mark.logic
ROOT = root_hash("model")


def chain_of(tokens: list[int], page_tokens: int = 4, root: bytes = ROOT) -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, root, tokens, page_tokens, len(tokens) // page_tokens)
    return chain


@pytest.mark.parametrize(("n_tokens", "n_pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_table_has_just_the_pages_its_tokens_need(n_tokens: int, n_pages: int):
    table = PageTable(PagePool(8, 4))
    assert table.cover(n_tokens) == n_tokens
    assert len(table.pages) == n_pages


def test_pages_are_only_appended():
    table = PageTable(PagePool(8, 4))
    table.cover(6)
    before = list(table.pages)
    table.cover(3)
    table.cover(17)
    assert table.pages[:2] == before and len(table.pages) == 5


def test_cover_says_how_far_the_pool_reached():
    pool = PagePool(3, 4)
    pool.take()
    table = PageTable(pool)
    assert table.cover(100) == 8
    assert len(table.pages) == 2


def test_list_of_pages_handed_out_survives_the_release():
    pool = PagePool(3, 4)
    table = PageTable(pool)
    table.cover(9)
    handed_out = table.pages
    table.release()
    assert handed_out == [0, 1, 2] and table.pages == [] and pool.n_free == 3


def test_fork_shares_full_pages_and_copies_the_partial_one():
    pool = PagePool(8, 4)
    table = PageTable(pool)
    table.cover(12)
    twin, copies = table.fork(10)
    assert twin.pages[:2] == table.pages[:2]
    assert copies == [(table.pages[2], twin.pages[2])]
    assert twin.pages[2] not in table.pages
    pool.check([table.pages, twin.pages])


def test_fork_at_the_end_of_a_page_copies_nothing():
    pool = PagePool(8, 4)
    table = PageTable(pool)
    table.cover(12)
    twin, copies = table.fork(8)
    assert copies == [] and twin.pages == table.pages[:2]
    assert pool.n_used == 3


def test_fork_of_nothing_is_an_empty_table():
    pool = PagePool(2, 4)
    table = PageTable(pool)
    table.cover(1)
    twin, copies = table.fork(0)
    assert (twin.pages, copies) == ([], [])


def test_fork_without_a_page_for_the_copy_changes_nothing():
    pool = PagePool(2, 4)
    table = PageTable(pool)
    table.cover(6)
    assert table.fork(5) is None
    pool.check([table.pages])


def test_both_sides_of_a_fork_grow_into_pages_of_their_own():
    pool = PagePool(8, 4)
    table = PageTable(pool)
    table.cover(6)
    twin, _ = table.fork(5)
    table.cover(12)
    twin.cover(12)
    assert set(table.pages) & set(twin.pages) == {table.pages[0]}
    table.release()
    pool.check([twin.pages])
    twin.release()
    assert pool.n_free == 8


def test_sealed_pages_are_shared_with_whoever_has_the_same_start():
    pool = PagePool(8, 4)
    tokens = list(range(12))
    table = PageTable(pool)
    table.cover(12)
    table.seal(chain_of(tokens), 2)
    hits = pool.match(chain_of([*range(8), 99, 99, 99, 99]))
    assert hits == table.pages[:2]
    other = PageTable(pool, hits, len(hits))
    other.cover(12)
    pool.check([table.pages, other.pages])
    assert other.pages[:2] == table.pages[:2] and other.pages[2] != table.pages[2]


def test_page_is_sealed_once():
    pool = PagePool(4, 4)
    table = PageTable(pool)
    table.cover(8)
    chain = chain_of(list(range(8)))
    table.seal(chain, 1)
    table.seal(chain, 1)
    assert table.n_sealed == 1 and pool.match(chain) == table.pages[:1]
    table.seal(chain, 2)
    assert table.n_sealed == 2 and pool.match(chain) == table.pages


def test_chain_hashes_the_parent_and_the_tokens_of_each_page():
    first = page_hash(ROOT, [1, 2])
    assert chain_of([1, 2, 3, 4, 5], 2) == [first, page_hash(first, [3, 4])]


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20), st.integers(1, 5))
def test_chains_agree_exactly_as_far_as_full_pages_agree(a: list[int], b: list[int], page_tokens: int):
    equal = [x == y for x, y in zip(chain_of(a, page_tokens), chain_of(b, page_tokens))]
    for i, same in enumerate(equal):
        end = (i + 1) * page_tokens
        assert same == (a[:end] == b[:end])


@given(st.lists(st.integers(0, 3), min_size=4, max_size=20), st.integers(0, 4))
def test_chain_extended_in_pieces_is_the_same_chain(tokens: list[int], first: int):
    whole = chain_of(tokens)
    pieces: list[bytes] = []
    extend_chain(pieces, ROOT, tokens, 4, min(first, len(whole)))
    extend_chain(pieces, ROOT, tokens, 4, len(whole))
    assert pieces == whole


def test_another_salt_or_model_shares_no_page():
    tokens = list(range(8))
    chains = [chain_of(tokens, 4, root) for root in (ROOT, root_hash("model", "salt"), root_hash("other"))]
    assert len({name for chain in chains for name in chain}) == 6
