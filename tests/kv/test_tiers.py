"""What every tier promises, against a dict that remembers everything."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.base.errors import ConfigError
from kilat.kv.host_tier import HostTier
from kilat.kv.tier import Slots, Tier
from kilat.kv.tier_store import TierStore
from tests.kv.tiers import PAGE_BYTES, Pool, disk, get, host, name, page, read, wait_written

pytestmark = pytest.mark.logic

MAKERS: dict[str, Callable[[Path, int], Tier]] = {"host": lambda folder, n: host(n), "disk": disk}


@pytest.fixture(params=MAKERS)
def make(request: Any, tmp_path: Path) -> Callable[[int], Tier]:
    return lambda n: MAKERS[request.param](tmp_path, n)


def test_page_comes_back_as_it_was(make: Callable[[int], Tier]) -> None:
    tier = make(3)
    assert not tier.has(name(1)) and not get(tier, 1)
    tier.put(name(1), page(1))
    assert tier.has(name(1)) and get(tier, 1) and get(tier, 1)
    told = {k.rpartition(f"{tier.kind}_")[2]: v for k, v in tier.counters().items()}
    assert told["hits_total"] == 2
    assert told["read_bytes_total"] == 2 * told["written_bytes_total"] == 2 * PAGE_BYTES
    tier.close()


def test_least_wanted_page_has_to_leave(make: Callable[[int], Tier]) -> None:
    tier = make(3)
    for i in range(3):
        tier.put(name(i), page(i))
    tier.touch([name(9), name(0)])
    tier.put(name(1), page(1))  # it is there: that is a touch
    tier.put(name(3), page(3))
    assert [get(tier, i) for i in range(4)] == [True, True, False, True]
    assert tier.take_lost() == [name(2)]
    assert tier.take_lost() == []
    assert sorted(tier.names()) == [name(0), name(1), name(3)]
    tier.close()


@pytest.mark.parametrize("kind", MAKERS)
def test_tier_without_room_for_a_page_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match="more"):
        MAKERS[kind](tmp_path, 0)


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(sorted(MAKERS)),
    n=st.integers(1, 4),
    calls=st.lists(
        st.tuples(st.sampled_from(["put", "get", "touch", "reopen"]), st.integers(0, 6)), max_size=30
    ),
)
def test_tier_keeps_what_a_model_keeps(kind: str, n: int, calls: list[tuple[str, int]]) -> None:
    kept: OrderedDict[int, None] = OrderedDict()
    with TemporaryDirectory() as folder:
        tier = MAKERS[kind](Path(folder), n)
        for call, i in calls:
            if call == "put":
                if i not in kept and len(kept) == n:
                    kept.popitem(last=False)
                kept[i] = None
                kept.move_to_end(i)
                tier.put(name(i), page(i))
            elif call == "get":
                assert get(tier, i) == (i in kept)
            elif call == "touch":
                if i in kept:
                    kept.move_to_end(i)
                tier.touch([name(i)])
            elif kind == "disk":
                tier.close()
                tier = MAKERS[kind](Path(folder), n)
            assert tier.names() == [name(k) for k in kept]
        tier.close()


def test_place_that_is_read_is_not_given_away() -> None:
    slots = Slots(2)
    for i in range(2):
        place = slots.take()
        assert place is not None
        slots.fill(name(i), place[0])
    first = slots.begin_read(name(0))
    assert first is not None
    place = slots.take()
    assert place is not None and place[1] == name(1)
    assert slots.take() is None
    slots.end_read(first)
    assert slots.take() == (first, name(0))


# -- the store of all tiers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Pool:
    return Pool(8)


def save(store: TierStore, pool: Pool, *numbers: int) -> None:
    """Pages leave the pool, whose memory gets another content at once."""
    for i in numbers:
        pool.pages[0] = page(i)
        store.save(name(i), 0)
        pool.pages[0] = 0
    wait_written(store, [name(i) for i in numbers])


def test_saved_pages_come_back_into_others(tmp_path: Path, pool: Pool) -> None:
    store = TierStore([disk(tmp_path, 8)], pool, 8, PAGE_BYTES)
    save(store, pool, 1, 2, 3)
    assert store.find([name(1), name(2), name(9), name(3)]) == ["disk", "disk"]
    done = read(store, [name(1), name(2), name(3)], [5, 7, 6])
    assert (done.ok, done.n_bytes) == (True, 3 * PAGE_BYTES)
    assert all(np.array_equal(pool.pages[at], page(i)) for i, at in ((1, 5), (2, 7), (3, 6)))
    assert [m.n_pages for m in store.take_measured()] == [1, 1, 1]
    store.close()
    store.close()


def test_missing_page_fails_the_read(tmp_path: Path, pool: Pool) -> None:
    store = TierStore([disk(tmp_path, 8)], pool, 8, PAGE_BYTES)
    save(store, pool, 1)
    done = read(store, [name(1), name(2)], [5, 6])
    assert not done.ok and "no tier" in done.why
    store.close()


def test_page_goes_from_host_to_disk_and_is_found_there(tmp_path: Path, pool: Pool) -> None:
    below = disk(tmp_path, 8)
    store = TierStore([host(2, below.put), below], pool, 8, PAGE_BYTES)
    save(store, pool, 1, 2, 3)
    assert store.find([name(1), name(2), name(3)]) == ["disk", "host", "host"]
    assert read(store, [name(1), name(2), name(3)], [1, 2, 3]).ok
    assert [m.tier for m in store.take_measured()] == ["disk", "host", "host"]
    assert store.take_lost() == []
    store.close()
    again = disk(tmp_path, 8)  # what was in memory only has been written
    assert all(get(again, i) for i in (1, 2, 3))
    again.close()


def test_start_of_a_chain_outlives_its_end(tmp_path: Path, pool: Pool) -> None:
    tier = disk(tmp_path, 3)
    store = TierStore([tier], pool, 8, PAGE_BYTES)
    save(store, pool, 3, 2, 1)
    assert read(store, [name(1), name(2), name(3)], [1, 2, 3]).ok
    save(store, pool, 4)
    assert store.find([name(1), name(2), name(3)]) == ["disk", "disk"]
    assert store.take_lost() == [name(3)]
    store.close()


def test_slow_tier_costs_pages_and_no_time(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, gate = host(8), threading.Event()
    put = tier.put
    monkeypatch.setattr(tier, "put", lambda *a: gate.wait(10) and put(*a))
    store = TierStore([tier], pool, 8, PAGE_BYTES)
    for i in range(20):
        store.save(name(i), 0)
    forgotten = store.counters()["kilat_tier_pages_forgotten_total"]
    assert 0 < forgotten < 20
    assert store.holds(name(0)) and not store.has(name(0))
    gate.set()
    wait_written(store, [name(0)])
    store.close()


def test_page_that_could_not_be_written_is_told_as_lost(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = host(8)
    monkeypatch.setattr(tier, "put", lambda name, page: 1 / 0)
    store = TierStore([tier], pool, 8, PAGE_BYTES)
    store.save(name(1), 0)
    store._queue.put(None)
    store._writer.join(10)
    assert store.take_lost() == [name(1)]
    assert not store.holds(name(1))
    store.close()


def test_a_page_on_its_way_to_the_next_tier_is_found_and_waited_for() -> None:
    next_tier: dict[bytes, bytes] = {}
    began, may_end = threading.Event(), threading.Event()

    def spill(name: bytes, page: np.ndarray) -> None:
        began.set()
        assert may_end.wait(10)
        next_tier[name] = page.tobytes()

    tier = HostTier(np.zeros((1, 8), np.uint8), spill)
    tier.put(b"old", np.full(8, 1, np.uint8))
    writer = threading.Thread(target=tier.put, args=(b"new", np.full(8, 2, np.uint8)))
    writer.start()
    assert began.wait(10)
    assert tier.has(b"old")
    answers: list[tuple[bool, bool]] = []
    into = np.zeros(8, np.uint8)
    reader = threading.Thread(target=lambda: answers.append((tier.get(b"old", into), b"old" in next_tier)))
    reader.start()
    may_end.set()
    for thread in (reader, writer):
        thread.join(10)
    assert answers == [(False, True)]  # whoever asks the next tier now finds it there
    assert not tier.has(b"old") and tier.get(b"new", into) and into.tolist() == [2] * 8


def test_a_page_that_finds_all_places_being_read_goes_to_the_next_tier() -> None:
    next_tier: dict[bytes, bytes] = {}
    tier = HostTier(np.zeros((1, 8), np.uint8), lambda name, page: next_tier.update({name: page.tobytes()}))
    tier.put(b"read", np.full(8, 1, np.uint8))
    tier._slots.begin_read(b"read")
    tier.put(b"late", np.full(8, 2, np.uint8))
    assert tier.has(b"read") and next_tier == {b"late": bytes([2] * 8)}


def test_a_page_that_never_reaches_the_next_tier_is_told_though_somebody_asked_on_its_way() -> None:
    asked: list[list[bytes]] = []
    tier = HostTier(np.zeros((1, 8), np.uint8), lambda name, page: asked.append(tier.take_lost()))
    tier.put(b"old", np.full(8, 1, np.uint8))
    tier.put(b"new", np.full(8, 2, np.uint8))
    assert asked == [[b"old"]]  # at that moment it still counts as here, so the answer was of no use
    assert not tier.has(b"old") and tier.take_lost() == [b"old"]
