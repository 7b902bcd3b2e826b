"""What the checksum of a page notices."""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.kv.checksum import PIECE_BYTES, page_checksum

pytestmark = pytest.mark.logic


def page(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, n, np.uint8)


@pytest.mark.parametrize("n", [1, 100, PIECE_BYTES, PIECE_BYTES + 2, 3 * PIECE_BYTES, 10_000])
def test_it_is_the_crc_of_the_sums_by_its_definition(n: int) -> None:
    p = page(n)
    whole = n // PIECE_BYTES * PIECE_BYTES
    words = [int.from_bytes(p[i : i + 8].tobytes(), "little") for i in range(0, whole, 8)]
    sums = [sum(words[i : i + 512]) % 2**64 for i in range(0, len(words), 512)]
    data = b"".join(s.to_bytes(8, "little") for s in sums) + p[whole:].tobytes()
    assert page_checksum(p) == zlib.crc32(data)


@settings(max_examples=50)
@given(st.integers(1, 20_000), st.integers(0, 1 << 30), st.integers(1, 255))
def test_changed_byte_is_noticed(n: int, at: int, change: int) -> None:
    p = page(n, at)
    before = page_checksum(p)
    p[at % n] ^= change
    assert page_checksum(p) != before


def test_damage_of_many_bytes_and_pieces_that_changed_places_are_noticed() -> None:
    p = page(8 * PIECE_BYTES)
    before = page_checksum(p)
    swapped = p.reshape(8, -1)[[1, 0, 2, 3, 4, 5, 6, 7]].reshape(-1)
    assert page_checksum(swapped) != before
    for seed in range(20):
        damaged = p.copy()
        at = seed * 1000
        damaged[at : at + 300] = page(300, seed + 1)
        assert page_checksum(damaged) != before


def test_page_at_any_place_of_a_pool_has_the_same() -> None:
    p = page(PIECE_BYTES + 6)
    pool = np.zeros(3 * len(p), np.uint8).reshape(3, -1)
    pool[1] = p
    assert page_checksum(pool[1]) == page_checksum(p)
