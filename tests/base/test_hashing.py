"""Page hashes and sample seeds must never change by accident: pages and sessions outlive the process that named them."""

import struct
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.base.hashing import HASH_BYTES, branch_seed, page_hash, root_hash

pytestmark = pytest.mark.logic

token_ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)
words = st.text(max_size=12)


def by_hand(parent: bytes, ids: list[int]) -> bytes:
    """The definition: keyed BLAKE2b of the ids as 32-bit little-endian numbers."""
    return blake2b(struct.pack(f"<{len(ids)}i", *ids), key=parent, digest_size=16).digest()


def test_root_is_the_hash_of_the_counted_name_and_the_salt() -> None:
    assert root_hash("m") == blake2b(b"1:m", digest_size=16).digest()
    assert root_hash("smollm2/f32", "acme") == blake2b(b"11:smollm2/f32acme", digest_size=16).digest()
    assert root_hash("\u00e9") == blake2b("1:\u00e9".encode(), digest_size=16).digest()


def test_known_vectors_hold() -> None:
    """Written down once. If this fails, stored pages and the pages of running peers are lost: raise the protocol version."""
    root = root_hash("vector", "salt")
    assert root.hex() == "02921291d02d6d1fe0da67883a071543"
    assert page_hash(root, range(16)).hex() == "6b155bb11d0af06f26e4c93e041f048a"
    assert branch_seed(1, 1) == 4283666593420606023


@given(words, token_ids)
def test_page_hash_is_the_definition(model: str, ids: list[int]) -> None:
    root = root_hash(model)
    assert page_hash(root, ids) == by_hand(root, ids)
    assert page_hash(root, tuple(ids)) == by_hand(root, ids)
    assert len(page_hash(root, ids)) == len(root) == HASH_BYTES == 16


@given(words, words, words)
def test_salt_separates_tenants(model: str, a: str, b: str) -> None:
    assert (root_hash(model, a) == root_hash(model, b)) == (a == b)


@given(words, words, words, words)
def test_model_and_salt_cannot_be_shifted_into_each_other(m1: str, s1: str, m2: str, s2: str) -> None:
    assert (root_hash(m1, s1) == root_hash(m2, s2)) == ((m1, s1) == (m2, s2))


def test_text_that_looks_like_a_count_does_not_shift_either() -> None:
    assert root_hash("a", "b") != root_hash("ab") != root_hash("", "ab")
    assert root_hash("1:a") != root_hash("a", ":1")


@given(token_ids, token_ids)
def test_page_is_named_by_all_its_tokens_in_order(a: list[int], b: list[int]) -> None:
    root = root_hash("m")
    assert (page_hash(root, a) == page_hash(root, b)) == (a == b)


@given(st.lists(token_ids, min_size=2, max_size=5), st.data())
def test_change_in_any_page_changes_every_page_after_it_and_none_before(
    pages: list[list[int]], data: st.DataObject
) -> None:
    def chain(of: list[list[int]]) -> list[bytes]:
        at, names = root_hash("m", "t"), []
        for page in of:
            at = page_hash(at, page)
            names.append(at)
        return names

    k = data.draw(st.integers(0, len(pages) - 1))
    other = [*pages[:k], [*pages[k][:-1], pages[k][-1] ^ 1], *pages[k + 1 :]]
    for i, (x, y) in enumerate(zip(chain(pages), chain(other), strict=True)):
        assert (x == y) == (i < k)


def test_same_tokens_under_another_parent_have_another_name() -> None:
    ids = list(range(16))
    names = {page_hash(root_hash(m, s), ids) for m, s in [("a", ""), ("b", ""), ("a", "t1"), ("a", "t2")]}
    assert len(names) == 4


@pytest.mark.parametrize("bad", [2**31, -(2**31) - 1, 2**40])
def test_id_that_needs_more_than_32_bits_is_an_error_and_not_another_id(bad: int) -> None:
    with pytest.raises(OverflowError):
        page_hash(root_hash("m"), [1, bad])


# -- seeds ------------------------------------------------------------------------------------------------------------------------

seeds = st.integers(-(2**63), 2**63 - 1)


@given(seeds)
def test_first_sample_keeps_the_seed_of_its_request(seed: int) -> None:
    assert branch_seed(seed, 0) == seed


@given(seeds, st.integers(1, 15))
def test_seed_of_another_sample_is_the_definition_and_has_63_bits(seed: int, k: int) -> None:
    digest = blake2b(f"{seed}:{k}".encode(), digest_size=8).digest()
    assert branch_seed(seed, k) == struct.unpack("<Q", digest)[0] // 2
    assert 0 <= branch_seed(seed, k) < 2**63


@given(seeds)
def test_samples_of_a_request_have_different_seeds(seed: int) -> None:
    assert len({branch_seed(seed, k) for k in range(16)}) == 16


def test_neighbouring_seeds_share_no_sample() -> None:
    drawn = [branch_seed(seed, k) for seed in range(64) for k in range(1, 16)]
    assert len(set(drawn)) == len(drawn)
