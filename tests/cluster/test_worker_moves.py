"""Sessions and pages between two worker loops: same tokens as alone, pages moved once, nothing left pinned."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from worker_pair import Worker, introduce

from kilat.base.ids import branch_id
from kilat.kv.board import Board
from kilat.kv.local import LocalHub, LocalTransport
from kilat.kv.transport import Done, Pages
from kilat.policy.route.index import PrefixIndex
from kilat.wire.kv import Offer
from kilat.wire.messages import (
    Abort,
    Adopt,
    Drain,
    Export,
    Fetch,
    Fetched,
    Lend,
    Offered,
    PagesChanged,
    Refused,
    Release,
    Resync,
    StepEvents,
    Submit,
)
from kilat.wire.session import SessionRecord
from tests.policy.sched.fakes import alone, record

pytestmark = pytest.mark.logic

KINDS = ["local", "shm", "tcp"]
PROMPT = [k % 7 for k in range(45)]
Start = Callable[..., Worker]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts workers: ``start(name, transport, **settings of the engine)``; they know each other after ``introduce``."""
    hub = LocalHub()
    made: list[Worker] = []

    def make(name: str, transport: Any = "local", **settings: Any) -> Worker:
        made.append(Worker(name, hub, transport, **settings))
        return made[-1]

    yield make
    for w in made:
        w.stop()


def pair(start: Start, transport: Any = "local", **settings: Any) -> tuple[Worker, Worker]:
    p, d = start("p", transport, **settings), start("d", transport, **settings)
    introduce(p, d)
    return p, d


def hand_over(p: Worker, d: Worker, r: SessionRecord) -> tuple[list[Offered], list[Fetched]]:
    """What a gateway does: from the submission to the last release. Returns the offers and the reports."""
    p.tell(Submit(r, hand_over=True))
    offers: list[Offered] = []
    while not offers or offers[-1].record is None:
        offers.append(p.wait(Offered, lambda m: m.session_id == r.session_id))
        if offers[-1].record is None:
            d.tell(Fetch(r.session_id, offers[-1].offer))
    adopt(d, offers[-1])
    fetched = [d.wait(Fetched) for _ in offers]
    p.tell(Release([f.move_id for f in fetched]))
    return offers, fetched


def adopt(d: Worker, offered: Offered) -> None:
    assert offered.record is not None
    d.tell(Adopt(replace(offered.record, epoch=offered.record.epoch + 1), offered.offer))


def check_same(r: SessionRecord, *workers: Worker) -> None:
    """All samples said what they say alone, whoever said it."""
    for k in range(r.params.n):
        sample = branch_id(r.session_id, k)
        workers[-1].wait_end(sample)
        said = [t for w in workers for t in w.tokens(sample)]
        assert said == alone(r, k, 128)[0], sample


def check_clean(*workers: Worker) -> None:
    """No page is pinned, and the loop goes on."""
    for w in workers:
        w.until(lambda w=w: w.n_pinned == 0)  # type: ignore[misc]


@pytest.mark.parametrize("transport", KINDS)
@pytest.mark.parametrize("n", [1, 4])
def test_session_handed_over_says_the_same_as_alone(start: Start, transport: str, n: int) -> None:
    p, d = pair(start, transport)
    r = record("s", PROMPT, n=n, max_tokens=20)
    _, fetched = hand_over(p, d, r)
    check_same(r, p, d)
    assert len(p.tokens("s")) == 1  # the first token comes from where the prompt was
    assert all(f.ok for f in fetched)
    check_clean(p, d)
    assert d.engine.runner.n_tokens < 20 * n + 1  # nothing of the prompt was computed again


@pytest.mark.parametrize("transport", KINDS)
def test_pages_leave_chunk_by_chunk_and_each_once(start: Start, transport: str) -> None:
    p, d = pair(start, transport)
    r = record("s", PROMPT, max_tokens=3)
    offers, fetched = hand_over(p, d, r)
    spans = [(o.offer.first_token, o.offer.n_tokens) for o in offers]
    assert spans == [(0, 16), (16, 32), (32, 45)]
    assert [len(o.offer.pages) for o in offers] == [4, 4, 4]
    assert sum(f.n_bytes for f in fetched) == 12 * 16  # 45 tokens are 12 pages of 4 tokens
    assert len({f.move_id for f in fetched}) == 3
    check_same(r, p, d)


def test_pages_that_are_there_already_are_not_read(start: Start) -> None:
    p, d = pair(start)
    d.tell(Submit(record("before", PROMPT[:30], max_tokens=1)))
    d.wait_end("before")
    r = record("s", PROMPT, max_tokens=5)
    _, fetched = hand_over(p, d, r)
    assert all(f.ok for f in fetched)
    assert sum(f.n_bytes for f in fetched) == (12 - 7) * 16  # 30 tokens fill 7 pages
    check_same(r, p, d)
    check_clean(p, d)


def test_session_whose_first_token_ends_it_is_not_handed_over(start: Start) -> None:
    p, _ = pair(start)
    p.tell(Submit(record("s", PROMPT, max_tokens=1), hand_over=True))
    assert p.wait_end("s") == "length"
    p.tell(Release([o.offer.move_id for o in p.all(Offered)]))
    check_clean(p)
    assert all(o.record is None for o in p.all(Offered))


def test_many_sessions_at_once(start: Start) -> None:
    p, d = pair(start, "shm", n_pages=200)
    records = [record(f"s{k}", [*PROMPT[: 20 + k], k], max_tokens=6, seed=k) for k in range(12)]
    for r in records:
        p.tell(Submit(r, hand_over=True))
    left = {r.session_id for r in records}
    while left:
        offered = p.wait(Offered)
        if offered.record is None:
            d.tell(Fetch(offered.session_id, offered.offer))
        else:
            left.remove(offered.session_id)
            adopt(d, offered)
    for r in records:
        check_same(r, p, d)
    p.tell(Release([f.move_id for f in d.all(Fetched)]))
    assert all(f.ok for f in d.all(Fetched))
    check_clean(p, d)


# -- what goes wrong ------------------------------------------------------------------------------------------------------------------


def test_offer_that_was_taken_back_is_computed_again(start: Start) -> None:
    p, d = pair(start)
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


def test_what_was_read_before_a_failure_is_used(start: Start) -> None:
    p, d = pair(start)
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


def test_offer_that_nobody_releases_is_taken_back_in_time(start: Start) -> None:
    p, d = pair(start, offer_s=0.2)
    r = record("s", PROMPT, max_tokens=8)
    p.tell(Submit(r, hand_over=True))
    last = p.wait(Offered, lambda m: m.record is not None)
    check_clean(p)
    adopt(d, replace(last, offer=replace(last.offer, first_token=0, pages=last.offer.pages[:1], n_tokens=4)))
    assert not d.wait(Fetched).ok
    check_same(r, p, d)


def test_worker_without_a_way_computes(start: Start) -> None:
    p, d = start("p"), start("d")  # nobody told them of each other
    r = record("s", PROMPT, max_tokens=8)
    _, fetched = hand_over(p, d, r)
    assert not any(f.ok for f in fetched)
    assert "no way" in fetched[0].why
    check_same(r, p, d)
    check_clean(p, d)


def test_workers_that_cannot_move_pages_still_move_sessions(start: Start) -> None:
    p, d = start("p", None), start("d", None)
    assert (p.hello.layout, p.hello.endpoints) == (None, [])
    r = record("s", PROMPT, n=2, max_tokens=8)
    offers, fetched = hand_over(p, d, r)
    assert [o.offer.pages for o in offers] == [[]]
    assert fetched[0].ok
    check_same(r, p, d)
    check_clean(p, d)


def test_reader_without_free_pages_computes_later(start: Start) -> None:
    p, d = start("p"), start("d", n_pages=24, max_model_len=90)
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
def test_offer_that_makes_no_sense_is_reported_and_computed(start: Start, change: dict[str, Any]) -> None:
    p, d = pair(start, max_step_tokens=64)
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
def slow_pair(start: Start) -> tuple[Worker, Worker, SlowTransport]:
    hub = LocalHub()
    made: list[SlowTransport] = []

    def slow(pages: Pages, board: Board) -> SlowTransport:
        made.append(SlowTransport(hub, pages, board))
        return made[-1]

    p = start("p", lambda pages, board: LocalTransport(hub, pages, board), max_step_tokens=64)
    d = start("d", slow)
    introduce(p, d)
    return p, d, made[0]


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
    transport.held = False
    check_clean(d)
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
    start: Start, slow_pair: tuple[Worker, Worker, SlowTransport]
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


def test_drained_worker_stays_until_its_pages_are_read(start: Start) -> None:
    p, d = pair(start)
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


def test_session_that_cannot_be_taken_gives_its_pages_back(start: Start) -> None:
    p, d = pair(start)
    r = record("s", PROMPT, max_tokens=8)
    p.tell(Submit(r, hand_over=True))
    last = p.wait(Offered, lambda m: m.record is not None)
    assert last.record is not None
    for offered in p.all(Offered)[:-1]:
        d.tell(Fetch("s", offered.offer))
    d.tell(Adopt(replace(last.record, params=replace(r.params, max_tokens=1)), last.offer))
    assert d.wait(Refused).session_id == "s"
    check_clean(d)


# -- planned moves --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", KINDS)
@pytest.mark.parametrize("n", [1, 4])
def test_running_session_moves_and_says_the_same(start: Start, transport: str, n: int) -> None:
    a, b = start("a", transport, step_s=0.005), start("b", transport)
    introduce(a, b)
    r = record("s", PROMPT, n=n, max_tokens=60)
    samples = [branch_id("s", k) for k in range(n)]
    a.tell(Submit(r))
    for sample in samples:
        a.until(lambda sample=sample: len(a.tokens(sample)) >= 3)  # type: ignore[misc]
    a.tell(Export([*samples, "unknown"]))
    offers = [a.wait(Offered) for _ in samples]
    assert {o.session_id for o in offers} == set(samples)
    for offered in offers:
        assert offered.record is not None
        assert a.tokens(offered.session_id) == offered.record.output_ids  # the news came before the offer
        adopt(b, offered)
    a.tell(Release([b.wait(Fetched).move_id for _ in offers]))
    check_same(r, a, b)
    assert all(f.ok for f in b.all(Fetched))
    check_clean(a, b)
    assert a.tokens("s") and b.tokens("s")


def test_session_comes_back_to_where_it_was(start: Start) -> None:
    a, b = start("a", step_s=0.005), start("b", step_s=0.005)
    introduce(a, b)
    r = record("s", PROMPT, max_tokens=60)
    a.tell(Submit(r))
    a.until(lambda: len(a.tokens("s")) >= 3)
    a.tell(Export(["s"]))
    adopt(b, a.wait(Offered))
    a.tell(Release([b.wait(Fetched).move_id]))
    b.until(lambda: len(b.tokens("s")) >= 3)
    b.tell(Export(["s"]))
    adopt(a, b.wait(Offered))
    b.tell(Release([a.wait(Fetched).move_id]))
    assert a.wait_end("s") == "length"
    events = [(e.seq, e.token_ids) for w in (a, b) for m in w.all(StepEvents) for e in m.events]
    assert [t for _, ids in sorted(events) for t in ids] == alone(r, 0, 128)[0]
    check_clean(a, b)


def test_waiting_session_is_exported_without_pages(start: Start) -> None:
    a, b = pair(start, max_num_seqs=1)
    a.engine.gate.clear()
    a.tell(Submit(record("first", PROMPT, max_tokens=60)), Submit(record("s", PROMPT[:9], max_tokens=8)))
    a.tell(Export(["s"]))
    offered = a.wait(Offered)
    assert (offered.session_id, offered.offer.pages) == ("s", [])
    adopt(b, offered)
    check_same(record("s", PROMPT[:9], max_tokens=8), b)


# -- shared prefixes --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", KINDS)
def test_prefix_that_a_peer_holds_is_a_hit(start: Start, transport: str) -> None:
    a, b = pair(start, transport)
    a.tell(Resync(), Submit(record("first", PROMPT, max_tokens=1)))
    a.wait_end("first")
    names = prefix_names(a)
    a.tell(Lend("m1", [*names, b"x" * 16]))
    offered = a.wait(Offered)
    assert (offered.session_id, offered.offer.move_id, len(offered.offer.pages)) == ("m1", "m1", 11)
    r = record("s", PROMPT, n=2, max_tokens=8)
    b.tell(Submit(r, prefix=offered.offer))
    fetched = b.wait(Fetched)
    assert (fetched.session_id, fetched.ok, fetched.n_bytes) == ("s", True, 11 * 16)
    a.tell(Release(["m1"]))
    check_same(r, b)
    first = next(e for m in b.all(StepEvents) for e in m.events if e.session_id == "s")
    assert first.cached_tokens == 44
    check_clean(a, b)
    b.tell(Submit(record("t", PROMPT, max_tokens=8)))  # and it stays for others
    b.wait_end("t")
    again = next(e for m in b.all(StepEvents) for e in m.events if e.session_id == "t")
    assert again.cached_tokens == 44


def prefix_names(w: Worker) -> list[bytes]:
    """Names of the full pages of PROMPT, from its start."""
    told = [m for m in w.all(PagesChanged) if m.stored]
    return [name for m in told for name in m.stored][: len(PROMPT) // 4]


def test_unknown_prefix_is_answered_without_pages(start: Start) -> None:
    a, b = pair(start)
    a.tell(Lend("m1", [b"x" * 16]))
    offered = a.wait(Offered)
    assert offered.offer.pages == []
    r = record("s", PROMPT, max_tokens=8)
    b.tell(Submit(r, prefix=offered.offer))
    assert b.wait(Fetched).ok
    check_same(r, b)
    a.tell(Release(["m1"]))
    check_clean(a, b)


def test_prefix_whose_names_are_missing_is_computed(start: Start) -> None:
    a, b = pair(start)
    a.tell(Resync(), Submit(record("first", PROMPT, max_tokens=1)))
    a.wait_end("first")
    a.tell(Lend("m1", prefix_names(a)), Lend("m1", []))
    offered = a.wait(Offered)
    r = record("s", PROMPT, max_tokens=8)
    b.tell(Submit(r, prefix=replace(offered.offer, names=offered.offer.names[1:])))
    assert not b.wait(Fetched).ok
    check_same(r, b)
    assert len(a.all(Offered)) == 1


def test_prefix_and_hand_over_together(start: Start) -> None:
    a, b = pair(start)
    c = start("c")
    introduce(a, b, c)
    a.tell(Resync(), Submit(record("first", PROMPT, max_tokens=1)))
    a.wait_end("first")
    a.tell(Lend("m1", prefix_names(a)[:5]))
    r = record("s", PROMPT, max_tokens=8)
    b.tell(Submit(r, hand_over=True, prefix=a.wait(Offered).offer))
    while (offered := b.wait(Offered)).record is None:
        c.tell(Fetch("s", offered.offer))
    adopt(c, offered)
    check_same(r, b, c)
    a.tell(Release(["m1"]))
    b.tell(Release([o.offer.move_id for o in b.all(Offered)]))
    assert all(f.ok for f in c.all(Fetched))
    check_clean(a, b, c)


def test_index_that_follows_the_news_knows_what_the_worker_holds(start: Start) -> None:
    a = start("a", n_pages=16, max_model_len=60)
    a.tell(Submit(record("before", PROMPT, max_tokens=1)))
    a.wait_end("before")
    assert not a.all(PagesChanged)  # nobody has asked
    a.tell(Resync())
    for k in range(6):
        a.tell(Submit(record(f"s{k}", [k] * 30, max_tokens=3)))
        a.wait_end(f"s{k}")
        if k == 3:
            a.tell(Resync())
    index = PrefixIndex()
    names = lambda: set(a.engine.page_names())  # noqa: E731
    told = a.all(PagesChanged)
    assert [m.seq for m in told] == list(range(len(told)))
    assert [m.whole for m in told].count(True) == 2
    assert any(m.dropped for m in told)
    for message in told:
        assert index.apply("a", message)
    assert all(index.holders([name]) == {"a": 1} for name in names())
    held = {n for m in told for n in m.stored} - names()
    assert not any(index.holders([name]) for name in held)


def test_hello_tells_layout_and_endpoints(start: Start) -> None:
    a = start("a", "tcp")
    assert a.hello.layout == a.engine.pages.layout
    assert [e.transport for e in a.hello.endpoints] == ["tcp"]


def test_offer_that_is_passed_on_twice_is_read_once(start: Start) -> None:
    """A gateway that repeats itself does no harm."""
    p, d = pair(start)
    p.tell(Submit(record("s", PROMPT, max_tokens=8), hand_over=True))
    last = p.wait(Offered, lambda m: m.record is not None)
    first: Offer = p.all(Offered)[0].offer
    d.tell(Fetch("s", first), Fetch("s", first))
    assert sorted(d.wait(Fetched).ok for _ in range(2)) == [False, True]
    d.tell(Release([first.move_id]), Release([first.move_id]))
    p.tell(Release([o.offer.move_id for o in p.all(Offered)]), Release([last.offer.move_id]))
    check_clean(p, d)
