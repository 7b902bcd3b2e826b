"""Moves between worker loops that fail, are taken back, come late or twice: same tokens, nothing left pinned."""

from typing import Any

import pytest
from msgspec.structs import replace
from worker_pair import PROMPT, Start, Worker, adopt, check_clean, check_same, hand_over, introduce, pair

from kilat.kv.board import Board
from kilat.kv.local import LocalHub, LocalTransport
from kilat.kv.transport import Done, Pages
from kilat.wire.kv import Offer
from kilat.wire.messages import (
    Abort,
    Adopt,
    Drain,
    Export,
    Fetch,
    Fetched,
    Offered,
    Ping,
    Refused,
    Release,
    Status,
    StepEvents,
    Submit,
)
from tests.policy.sched.fakes import alone, record

pytestmark = pytest.mark.logic


def test_offer_that_was_taken_back_is_computed_again(start_worker: Start) -> None:
    p, d = pair(start_worker)
    r = record("s", PROMPT, max_tokens=8)
    p.tell(Submit(r, hand_over=True))
    last = p.wait(Offered, lambda m: m.record is not None)
    p.tell(Release([o.offer.move_id for o in p.all(Offered)]))
    check_clean(p)
    for offered in p.all(Offered)[:-1]:
        d.tell(Fetch("s", offered.offer))
    adopt(d, last)
    assert [d.wait(Fetched).ok for _ in p.all(Offered)] == [False] * 3
    check_same(r, p, d)
    check_clean(d)


def test_what_was_read_before_a_failure_is_used(start_worker: Start) -> None:
    p, d = pair(start_worker)
    r = record("s", PROMPT, max_tokens=8)
    p.tell(Submit(r, hand_over=True))
    first = p.wait(Offered)
    d.tell(Fetch("s", first.offer))
    assert d.wait(Fetched).ok
    last = p.wait(Offered, lambda m: m.record is not None)
    p.tell(Release([o.offer.move_id for o in p.all(Offered)]))
    check_clean(p)
    adopt(d, last)  # the chunk in the middle never came
    assert not d.wait(Fetched).ok
    check_same(r, p, d)
    assert (
        d.engine.runner.n_tokens == (46 - 16) + 6
    )  # what was known and not read, then one row for each further token but the last
    check_clean(d)


def test_offer_that_nobody_releases_is_taken_back_in_time(start_worker: Start) -> None:
    p, d = pair(start_worker, offer_s=0.2)
    r = record("s", PROMPT, max_tokens=8)
    p.tell(Submit(r, hand_over=True))
    last = p.wait(Offered, lambda m: m.record is not None)
    check_clean(p)
    adopt(d, replace(last, offer=replace(last.offer, first_token=0, pages=last.offer.pages[:1], n_tokens=4)))
    assert not d.wait(Fetched).ok
    check_same(r, p, d)


def test_worker_without_a_way_computes(start_worker: Start) -> None:
    p, d = start_worker("p"), start_worker("d")  # nobody told them of each other
    r = record("s", PROMPT, max_tokens=8)
    _, fetched = hand_over(p, d, r)
    assert not any(f.ok for f in fetched)
    assert "no way" in fetched[0].why
    check_same(r, p, d)
    check_clean(p, d)


def test_workers_that_cannot_move_pages_still_move_sessions(start_worker: Start) -> None:
    p, d = start_worker("p", None), start_worker("d", None)
    assert (p.hello.layout, p.hello.endpoints) == (None, [])
    r = record("s", PROMPT, n=2, max_tokens=8)
    offers, fetched = hand_over(p, d, r)
    assert [o.offer.pages for o in offers] == [[]]
    assert fetched[0].ok
    check_same(r, p, d)
    check_clean(p, d)


def test_reader_without_free_pages_computes_later(start_worker: Start) -> None:
    p, d = start_worker("p"), start_worker("d", n_pages=24, max_model_len=90)
    introduce(p, d)
    d.engine.gate.clear()
    d.tell(Submit(record("big", [5] * 60, max_tokens=20)))
    r = record("s", PROMPT, max_tokens=8)
    d.engine.gate.set()
    d.wait(StepEvents)
    d.engine.gate.clear()
    p.tell(Submit(r, hand_over=True))
    last = p.wait(Offered, lambda m: m.record is not None)
    d.tell(Fetch("s", p.all(Offered)[0].offer), Fetch("s", p.all(Offered)[1].offer))
    adopt(d, last)
    reports = [d.wait(Fetched) for _ in range(3)]
    assert "no pages" in next(f.why for f in reports if not f.ok)
    d.engine.gate.set()
    check_same(r, p, d)
    p.tell(Release([f.move_id for f in reports]))
    check_clean(p, d)


@pytest.mark.parametrize(
    "change",
    [
        {"first_token": 4},
        {"n_tokens": 46 + 4},
        {"pages": [1]},
        {"pages": []},
        {"pages": [10**6] * 12},
        {"owner": "nobody"},
        {"n_tokens": -5},
    ],
)
def test_offer_that_makes_no_sense_is_reported_and_computed(
    start_worker: Start, change: dict[str, Any]
) -> None:
    p, d = pair(start_worker, max_step_tokens=64)
    r = record("s", PROMPT, max_tokens=8)
    p.tell(Submit(r, hand_over=True))
    last = p.wait(Offered)
    adopt(d, replace(last, offer=replace(last.offer, **change)))
    assert not d.wait(Fetched).ok
    check_same(r, p, d)
    check_clean(d)


class SlowTransport(LocalTransport):
    """Reads whose end nobody is told before ``let_go``."""

    held = True

    def poll(self) -> list[Done]:
        return [] if self.held else super().poll()


@pytest.fixture
def slow_pair(start_worker: Start) -> tuple[Worker, Worker, SlowTransport]:
    hub = LocalHub()
    made: list[SlowTransport] = []

    def slow(pages: Pages, board: Board) -> SlowTransport:
        made.append(SlowTransport(hub, pages, board))
        return made[-1]

    p = start_worker("p", lambda pages, board: LocalTransport(hub, pages, board), max_step_tokens=64)
    d = start_worker("d", slow)
    introduce(p, d)
    return p, d, made[0]


def gauges(w: Worker) -> dict[str, float]:
    """Pages by the state of their move, as a Status tells them."""
    w.tell(Ping())
    told = w.wait(Status).gauges
    return {state: told[f"kilat_pages_{state}"] for state in ("offered", "moving", "quarantined")}


def test_pages_that_may_still_be_written_are_kept_after_an_abort(
    slow_pair: tuple[Worker, Worker, SlowTransport],
) -> None:
    p, d, transport = slow_pair
    p.tell(Submit(record("s", PROMPT, n=2, max_tokens=8), hand_over=True))
    last = p.wait(Offered)
    adopt(d, last)
    d.until(lambda: d.n_pinned == 12)
    d.tell(Abort(["s"]))
    ended = d.wait(StepEvents).events
    assert [(e.session_id, e.finish, e.epoch, e.seq) for e in ended] == [
        ("s", "abort", 1, 1),
        ("s#1", "abort", 1, 0),
    ]
    assert d.n_pinned == 12
    assert gauges(d) == {"offered": 0, "moving": 0, "quarantined": 12}
    assert gauges(p) == {"offered": 12, "moving": 0, "quarantined": 0}
    transport.held = False
    check_clean(d)
    assert gauges(d)["quarantined"] == 0
    assert not d.all(Fetched)
    p.tell(Release([last.offer.move_id]))
    check_clean(p)


def test_sample_that_is_aborted_on_the_way_does_not_run(
    slow_pair: tuple[Worker, Worker, SlowTransport],
) -> None:
    p, d, transport = slow_pair
    r = record("s", PROMPT, n=3, max_tokens=8)
    p.tell(Submit(r, hand_over=True))
    adopt(d, p.wait(Offered))
    d.until(lambda: d.n_pinned > 0)
    d.tell(Abort(["s#1"]), Abort(["other"]))
    transport.held = False
    assert d.wait_end("s#1") == "abort"
    assert d.wait_end("s") == d.wait_end("s#2") == "length"
    assert d.tokens("s#1") == []
    assert p.tokens("s") + d.tokens("s") == alone(r, 0, 128)[0]


def test_release_before_the_session_comes_drops_what_was_read(
    slow_pair: tuple[Worker, Worker, SlowTransport],
) -> None:
    p, d, transport = slow_pair
    p.tell(Submit(record("s", PROMPT, max_tokens=8), hand_over=True))
    offer = p.wait(Offered).offer
    d.tell(Fetch("s", offer))
    d.until(lambda: d.n_pinned == 12)
    d.tell(Release([offer.move_id]))
    transport.held = False
    check_clean(d)
    d.tell(Fetch("t", offer))  # and again, with a read that ends before the release
    assert d.wait(Fetched).ok
    assert d.n_pinned == 12
    d.tell(Release([offer.move_id]), Release(["unknown"]))
    check_clean(d)


def test_session_on_its_way_is_exported_without_pages(
    start_worker: Start, slow_pair: tuple[Worker, Worker, SlowTransport]
) -> None:
    p, d, transport = slow_pair
    r = record("s", PROMPT, max_tokens=8)
    p.tell(Submit(r, hand_over=True))
    adopt(d, p.wait(Offered))
    d.until(lambda: d.n_pinned > 0)
    d.tell(Export(["s"]))
    offered = d.wait(Offered)
    assert offered.offer.pages == []
    transport.held = False
    adopt(p, offered)
    p.wait_end("s")
    assert p.tokens("s") == alone(r, 0, 128)[0]
    check_clean(d)


def test_drain_ends_what_is_on_its_way_at_its_deadline(
    slow_pair: tuple[Worker, Worker, SlowTransport],
) -> None:
    p, d, _ = slow_pair
    p.tell(Submit(record("s", PROMPT, max_tokens=8), hand_over=True))
    adopt(d, p.wait(Offered))
    d.until(lambda: d.n_pinned > 0)
    d.tell(Drain(0.05))
    assert d.wait_end("s") == "abort"


def test_drained_worker_stays_until_its_pages_are_read(start_worker: Start) -> None:
    p, d = pair(start_worker)
    r = record("s", PROMPT, max_tokens=8)
    p.tell(Submit(r, hand_over=True))
    last = p.wait(Offered, lambda m: m.record is not None)
    p.tell(Drain(20.0))
    for offered in p.all(Offered)[:-1]:
        d.tell(Fetch("s", offered.offer))
    adopt(d, last)
    reports = [d.wait(Fetched) for _ in range(3)]
    assert all(f.ok for f in reports)
    p.tell(Submit(record("late", [1])))
    assert p.wait(Refused).status == 503
    p.tell(Release([f.move_id for f in reports]))
    p._thread.join(10)
    assert not p._thread.is_alive()
    check_same(r, p, d)


def test_session_that_cannot_be_taken_gives_its_pages_back(start_worker: Start) -> None:
    p, d = pair(start_worker)
    r = record("s", PROMPT, max_tokens=8)
    p.tell(Submit(r, hand_over=True))
    last = p.wait(Offered, lambda m: m.record is not None)
    assert last.record is not None
    for offered in p.all(Offered)[:-1]:
        d.tell(Fetch("s", offered.offer))
    d.tell(Adopt(replace(last.record, params=replace(r.params, max_tokens=1)), last.offer))
    assert d.wait(Refused).session_id == "s"
    check_clean(d)


def test_offer_that_is_passed_on_twice_is_read_once(start_worker: Start) -> None:
    """A gateway that repeats itself does no harm."""
    p, d = pair(start_worker)
    p.tell(Submit(record("s", PROMPT, max_tokens=8), hand_over=True))
    last = p.wait(Offered, lambda m: m.record is not None)
    first: Offer = p.all(Offered)[0].offer
    d.tell(Fetch("s", first), Fetch("s", first))
    assert sorted(d.wait(Fetched).ok for _ in range(2)) == [False, True]
    d.tell(Release([first.move_id]), Release([first.move_id]))
    p.tell(Release([o.offer.move_id for o in p.all(Offered)]), Release([last.offer.move_id]))
    check_clean(p, d)
