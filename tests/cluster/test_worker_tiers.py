"""A worker whose pool is so small that prefixes must come back from its tiers: same tokens as alone, and nothing stays pinned."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sched_engine import SchedEngine
from tiered import DISK_BYTES, Tiered
from worker_pair import Start, check_clean, check_same, introduce

from kilat.base.errors import ConfigError
from kilat.cluster.worker.tier_files import content_key, with_tiers
from kilat.cluster.worker_config import WorkerConfig
from kilat.policy.route.index import PrefixIndex
from kilat.wire.messages import (
    Abort,
    Fetched,
    Lend,
    Offered,
    PagesChanged,
    Recalled,
    Refused,
    Release,
    Resync,
    Submit,
)
from tests.policy.sched.fakes import record

pytestmark = pytest.mark.logic

PAGE_BYTES = 16
SYSTEM = [(7 * k) % 11 for k in range(40)]
OTHER = [(5 * k) % 7 for k in range(56)]


@pytest.fixture
def start_tiered(tmp_path: Path) -> Iterator[Callable[..., Tiered]]:
    made: list[Tiered] = []

    def start(folder: str = "disk", **settings: Any) -> Tiered:
        made.append(Tiered(tmp_path / folder, **settings))
        return made[-1]

    yield start
    for w in made:
        if w._thread.is_alive():
            w.stop()


def forget(w: Tiered) -> None:
    """Use the pool for something else."""
    w.ask(f"other-{len(w.channel.sent)}", OTHER)
    w.settle()


@pytest.mark.parametrize("room", [0, 4, 64])
def test_prefix_comes_back_and_the_tokens_are_the_same(start_tiered: Any, room: int) -> None:
    w = start_tiered(room=room)
    w.ask("first", [*SYSTEM, 1, 2])
    forget(w)
    assert not w.all(Recalled)
    n_before = w.engine.runner.n_tokens
    w.ask("again", [*SYSTEM, 3, 4, 5])
    assert w.cached("again") == 40
    assert w.engine.runner.n_tokens - n_before < 10
    (told,) = w.all(Recalled)
    assert told.session_id == "again" and 0 < sum(told.pages.values()) <= 10
    assert told.n_bytes == PAGE_BYTES * sum(told.pages.values())
    assert set(told.pages) <= ({"disk", "host"} if room else {"disk"})
    check_clean(w)


def test_samples_and_a_grown_conversation_come_back_too(start_tiered: Any) -> None:
    w = start_tiered()
    r = w.ask("first", SYSTEM, max_tokens=12)
    said = w.tokens("first")
    forget(w)
    w.ask("again", [*SYSTEM, *said, 5], n=2, max_tokens=6)
    assert w.cached("again") >= 48
    assert r.session_id == "first"
    check_clean(w)


def test_restart_keeps_what_was_written(start_tiered: Any) -> None:
    w = start_tiered()
    w.ask("first", [*SYSTEM, 1])
    forget(w)
    w.stop()
    again = start_tiered()
    again.ask("s", [*SYSTEM, 2])
    assert again.cached("s") == 40
    assert again.engine.runner.n_tokens < 10


def test_another_tenant_does_not_find_it(start_tiered: Any) -> None:
    w = start_tiered()
    r = replace(record("first", [*SYSTEM, 1], max_tokens=2), salt="alice")
    w.tell(Submit(r))
    w.wait_end("first")
    forget(w)
    for tenant, n in (("bob", 0), ("alice", 40)):
        s = replace(record(tenant, [*SYSTEM, 1], max_tokens=2), salt=tenant)
        w.tell(Submit(s))
        w.wait_end(tenant)
        w.settle()  # pages that bob's prompt drove out are found when they are written
        assert w.cached(tenant) == n
        check_same(s, w)


def test_damaged_pages_are_computed(start_tiered: Any) -> None:
    w = start_tiered()
    w.ask("first", [*SYSTEM, 1])
    forget(w)
    size = (w.folder / "pages").stat().st_size
    with (w.folder / "pages").open("r+b") as f:
        for at in range(size // 4096 * 4096 - 4096 * 6, size, 4096):
            f.seek(at)
            f.write(b"\xaa" * PAGE_BYTES)
    w.ask("again", [*SYSTEM, 3])
    w.ask("more", [*SYSTEM, 4])
    assert w.store.counters()["kilat_tier_disk_damaged_total"] > 0
    check_clean(w)


def test_disk_that_fails_is_no_error(start_tiered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    w = start_tiered()
    w.ask("first", [*SYSTEM, 1])
    forget(w)

    def preadv(*args: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    w.ask("again", [*SYSTEM, 3])
    assert w.disk.is_off
    assert w.cached("again") < 40  # what the pool has left
    forget(w)
    check_clean(w)


def test_what_is_cheap_to_compute_is_not_read(start_tiered: Any) -> None:
    w = start_tiered(token_s=1e-9)
    w.ask("first", [*SYSTEM, 1])
    forget(w)
    w.ask("again", [*SYSTEM, 3])
    assert w.cached("again") < 40 and not w.all(Recalled)


def test_prompt_whose_logprobs_are_wanted_is_computed(start_tiered: Any) -> None:
    w = start_tiered()
    w.ask("first", [*SYSTEM, 1])
    forget(w)
    w.tell(Submit(record("again", [*SYSTEM, 3], max_tokens=2, prompt_logprobs=1)))
    w.wait_end("again")
    assert not w.all(Recalled)


class Gate:
    """Holds the reads of a tier until it is opened."""

    def __init__(self, w: Tiered, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = False
        poll = w.store.poll
        monkeypatch.setattr(w.store, "poll", lambda: poll() if self.is_open else [])


def test_sessions_with_one_prefix_read_it_once(start_tiered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    w = start_tiered(n_pages=40)
    w.ask("first", [*SYSTEM, 1])
    for _ in range(3):
        forget(w)
        w.ask(f"fill-{len(w.channel.sent)}", [len(w.channel.sent) % 11] * 60)
    w.settle()
    gate = Gate(w, monkeypatch)
    records = [record(f"s{k}", [*SYSTEM, k], max_tokens=3, n=2) for k in range(5)]
    w.tell(*[Submit(r) for r in records])
    w.until(lambda: len(w.loop._mover._arrivals) == 5)
    w.tell(Abort(["s2"]), Abort(["s3#1"]))
    w.until(lambda: len(w.loop._mover._arrivals) == 4)
    gate.is_open = True
    for r in records:
        if r.session_id == "s3":
            assert (w.wait_end("s3"), w.wait_end("s3#1")) == ("length", "abort")
        elif r.session_id != "s2":
            check_same(r, w)
    assert w.wait_end("s2") == "abort"
    assert len(w.all(Recalled)) == 1
    check_clean(w)


def test_reader_that_is_aborted_leaves_the_others_to_read(
    start_tiered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = start_tiered()
    w.ask("first", [*SYSTEM, 1])
    forget(w)
    gate = Gate(w, monkeypatch)
    a, b = (record(k, [*SYSTEM, 5], max_tokens=3) for k in "ab")
    w.tell(Submit(a), Submit(b))
    w.until(lambda: len(w.loop._mover._arrivals) == 2)
    w.tell(Abort(["a"]))
    assert w.wait_end("a") == "abort"
    gate.is_open = True
    check_same(b, w)
    check_clean(w)


def test_index_hears_of_pages_in_tiers(start_tiered: Any) -> None:
    w = start_tiered()
    w.tell(Resync())
    w.ask("first", [*SYSTEM, 1])
    names = [n for m in w.all(PagesChanged) for n in m.stored][:10]
    forget(w)
    index = PrefixIndex()
    assert all(index.apply("w", m) for m in w.all(PagesChanged))
    assert index.holders(names) == {"w": 10}
    assert w.engine.n_known(names) < 10
    w.stop()
    again = start_tiered()
    again.tell(Resync())
    whole = again.wait(PagesChanged, lambda m: m.whole)
    assert set(names) - set(whole.stored) <= set(names[: w.engine.n_known(names)])


def test_pages_that_a_tier_loses_are_told(start_tiered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    w = start_tiered()
    w.tell(Resync())
    w.ask("first", [*SYSTEM, 1])
    names = [n for m in w.all(PagesChanged) for n in m.stored][:10]
    forget(w)
    w.disk._fail(OSError(5, "gone"))
    w.ask("more", [1, 2, 3])

    def is_told() -> bool:
        index = PrefixIndex()
        assert all(index.apply("w", m) for m in w.all(PagesChanged))
        n_known = w.engine.n_known(names)
        return index.holders(names) == ({"w": n_known} if n_known else {})

    w.until(is_told)  # a page that was on its way to the tier is told when it has not got there


def test_page_that_leaves_the_pool_and_finds_the_disk_full_is_told_once(
    start_tiered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = start_tiered()
    w.tell(Resync())
    w.ask("first", [*SYSTEM, 1])
    forget(w)
    w.disk._fail(OSError(28, "No space left on device"))
    tiers = w.loop._mover._tiers
    assert tiers is not None
    changed = tiers.changed

    def changed_after_all_writes(stored: list[bytes], dropped: list[bytes]) -> Any:
        w.until(lambda: len(w.store._written) == len(w.store._coming))
        return changed(stored, dropped)

    monkeypatch.setattr(tiers, "changed", changed_after_all_writes)
    for k in range(3):
        w.ask(f"s{k}", [(k * (p + 3)) % 11 for p in range(60)])
    index = PrefixIndex()
    for m in w.all(PagesChanged):
        assert len(set(m.dropped)) == len(m.dropped)
        assert index.apply("w", m)
    assert index.names("w") == set(w.engine.page_names())
    check_clean(w)


def test_pages_from_a_tier_are_handed_over_like_any(start_tiered: Any) -> None:
    w = start_tiered()
    w.ask("first", [*SYSTEM, 1])
    forget(w)
    r = record("s", [*SYSTEM, 9], max_tokens=5)
    w.tell(Submit(r, hand_over=True))
    w.until(lambda: bool(w.tokens("s")))
    assert len(w.all(Recalled)) == 1
    assert w.cached("s") == 40


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50), st.integers(1, 2)), min_size=2, max_size=12),
    st.sampled_from([0, 3]),
)
def test_any_order_of_prompts_says_the_same(
    tmp_path_factory: pytest.TempPathFactory, asks: list[tuple[int, int, int]], room: int
) -> None:
    w = Tiered(tmp_path_factory.mktemp("disk"), room=room)
    try:
        records = [
            record(f"s{i}", [(k * (p + 3)) % 11 for k in range(n)], n=samples, max_tokens=3, seed=i)
            for i, (p, n, samples) in enumerate(asks)
        ]
        for r in records[: len(records) // 2]:
            w.tell(Submit(r))
            check_same(r, w)
        w.tell(*[Submit(r) for r in records[len(records) // 2 :]])
        for r in records:
            check_same(r, w)
        check_clean(w)
        assert not w.all(Refused)
    finally:
        w.stop()


def test_peers_read_pages_that_came_from_a_tier(start_tiered: Any, start_worker: Start) -> None:
    w = start_tiered()
    peer = start_worker("p", "shm")
    w.tell(Resync())
    w.ask("first", [*SYSTEM, 1])
    names = [n for m in w.all(PagesChanged) for n in m.stored][:10]
    forget(w)
    w.ask("again", [*SYSTEM, 2])
    assert w.all(Recalled)
    w.tell(Lend("m", names))
    offer = w.wait(Offered).offer
    assert len(offer.pages) == 10
    introduce(w, peer)
    r = record("s", [*SYSTEM, 3], max_tokens=6)
    peer.tell(Submit(r, prefix=offer))
    assert peer.wait(Fetched).ok
    check_same(r, peer)
    w.tell(Release(["m"]))
    check_clean(w, peer)


# -- how tiers are opened -------------------------------------------------------------------------------------------------------------


def config(**fields: Any) -> WorkerConfig:
    engine = msgspec.Raw(msgspec.json.encode(fields.pop("engine", {})))
    return WorkerConfig(address="", secret="x", worker_id="w", parent_pid=1, engine=engine, **fields)


def test_without_sizes_there_are_no_tiers() -> None:
    assert with_tiers(config(), SchedEngine(), None) is None


def test_disk_alone_needs_no_way_to_peers(tmp_path: Path) -> None:
    engine = SchedEngine()
    roads = with_tiers(config(disk_cache_bytes=DISK_BYTES, disk_cache_dir=str(tmp_path)), engine, None)
    assert engine.info.ledger_bytes == {"tiers": 64 * PAGE_BYTES}
    assert roads is not None and roads.store is not None and not roads.transports
    roads.store.close()
    assert (tmp_path / "pages").exists()


def test_host_tier_is_refused_where_the_pool_is_host_memory() -> None:
    with pytest.raises(ConfigError, match="--disk-cache-gb"):
        with_tiers(config(host_cache_bytes=DISK_BYTES), SchedEngine(), None)


def test_engine_without_a_prefix_cache_gets_no_tiers(tmp_path: Path) -> None:
    c = config(engine={"prefix_cache": False}, disk_cache_bytes=DISK_BYTES, disk_cache_dir=str(tmp_path))
    assert with_tiers(c, SchedEngine(), None) is None


def test_pages_of_other_weights_or_numbers_are_others(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1234")
    said = {"model_path": str(tmp_path), "dtype": "auto", "threads": 4}
    key = content_key(said, b"layout", "native, avx2")
    assert key == content_key({**said, "threads": 2, "max_num_seqs": 9}, b"layout", "native, avx2")
    others = [
        content_key({**said, "dtype": "bfloat16"}, b"layout", "native, avx2"),
        content_key(said, b"another", "native, avx2"),
        content_key(said, b"layout", "native, avx512"),
    ]
    weights.write_bytes(b"12345")
    others.append(content_key(said, b"layout", "native, avx2"))
    assert len({key, *others}) == 5
