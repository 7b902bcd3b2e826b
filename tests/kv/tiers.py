"""What tests of tiers share: pages, a pool without an engine, tiers of a few pages."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kilat.kv.disk_tier import BLOCK_BYTES, ENTRY_BYTES, DiskTier
from kilat.kv.host_tier import HostTier
from kilat.kv.tier import Tier
from kilat.kv.tier_store import TierStore
from kilat.kv.transport import Done
from kilat.wire.kv import Offer

PAGE_BYTES = 5000
KEY = b"k" * 16
LIMIT_S = 20.0


def name(i: int) -> bytes:
    return bytes([i + 1]) * 16


def page(i: int) -> np.ndarray:
    """The content of page ``i``, which no other page has."""
    return np.random.default_rng(i).integers(0, 256, PAGE_BYTES, np.uint8)


def disk_bytes(n_pages: int) -> int:
    """Room for so many pages."""
    return 2 * BLOCK_BYTES + n_pages * (-(-PAGE_BYTES // BLOCK_BYTES) * BLOCK_BYTES + ENTRY_BYTES)


def disk(folder: Path, n_pages: int, key: bytes = KEY) -> DiskTier:
    return DiskTier(folder, key, PAGE_BYTES, disk_bytes(n_pages))


def host(n_pages: int, spill: Callable[[bytes, np.ndarray], None] = lambda name, page: None) -> HostTier:
    return HostTier(np.zeros((n_pages, PAGE_BYTES), np.uint8), spill)


def get(tier: Tier, i: int) -> bool:
    """Whether the tier gives page ``i``; fails when it gives something else."""
    into = np.zeros(PAGE_BYTES, np.uint8)
    found = tier.get(name(i), into)
    assert not found or np.array_equal(into, page(i)), f"page {i} is another"
    return found


class Pool:
    """The pages of an engine, without one."""

    def __init__(self, n_pages: int) -> None:
        self.pages = np.zeros((n_pages, PAGE_BYTES), np.uint8)

    def save(self, page: int, into: np.ndarray) -> None:
        np.copyto(into, self.pages[page])

    def load(self, page: int, fill: Callable[[np.ndarray], bool]) -> bool:
        return fill(self.pages[page])

    def host_bytes(self, n_bytes: int) -> np.ndarray:
        return np.zeros(n_bytes, np.uint8)


def read(store: TierStore, names: list[bytes], into: list[int]) -> Done:
    """Read pages and wait for the end of it."""
    n = len(names)
    offer = Offer("m", "tier", 0, list(range(n)), 0, n, LIMIT_S, names)
    ticket = store.read(offer, range(n), into, LIMIT_S)
    until_s = time.monotonic() + LIMIT_S
    while not (done := store.poll()):
        assert time.monotonic() < until_s, "the read does not end"
        time.sleep(0.001)
    assert [d.ticket for d in done] == [ticket]
    return done[0]


def wait_written(store: TierStore, names: list[bytes]) -> None:
    """Until the writing thread has done these."""
    until_s = time.monotonic() + LIMIT_S
    while not all(store.has(n) for n in names):
        assert time.monotonic() < until_s, "a page is not written"
        time.sleep(0.001)
