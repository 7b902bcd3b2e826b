"""Sessions and pages between two worker loops: same tokens as alone, pages moved once, nothing left pinned."""

import time

import pytest
from msgspec.structs import replace
from worker_pair import KINDS, PROMPT, Start, adopt, check_clean, check_same, hand_over, introduce, pair

from kilat.base.ids import branch_id
from kilat.kv.board import Board
from kilat.kv.shm import ShmTransport
from kilat.kv.transport import Done, Pages
from kilat.wire.messages import (
    Abort,
    Announce,
    Export,
    Fetch,
    Fetched,
    Offered,
    Release,
    StepEvents,
    Submit,
)
from tests.policy.sched.fakes import alone, record

pytestmark = pytest.mark.logic


@pytest.mark.parametrize("transport", KINDS)
@pytest.mark.parametrize("n", [1, 4])
def test_session_handed_over_says_the_same_as_alone(start_worker: Start, transport: str, n: int) -> None:
    p, d = pair(start_worker, transport)
    r = record("s", PROMPT, n=n, max_tokens=20)
    _, fetched = hand_over(p, d, r)
    check_same(r, p, d)
    assert len(p.tokens("s")) == 1  # the first token comes from where the prompt was
    assert all(f.ok for f in fetched)
    check_clean(p, d)
    assert d.engine.runner.n_tokens < 20 * n + 1  # nothing of the prompt was computed again


@pytest.mark.parametrize("transport", KINDS)
def test_pages_leave_chunk_by_chunk_and_each_once(start_worker: Start, transport: str) -> None:
    p, d = pair(start_worker, transport)
    r = record("s", PROMPT, max_tokens=3)
    offers, fetched = hand_over(p, d, r)
    spans = [(o.offer.first_token, o.offer.n_tokens) for o in offers]
    assert spans == [(0, 16), (16, 32), (0, 45)]  # the last one is for whoever has none of it, too
    assert [len(o.offer.pages) for o in offers] == [4, 4, 12]
    assert sum(f.n_bytes for f in fetched) == 12 * 16  # 45 tokens are 12 pages of 4 tokens
    assert len({f.move_id for f in fetched}) == 3
    check_same(r, p, d)


@pytest.mark.parametrize("transport", KINDS)
def test_target_that_saw_no_chunk_reads_the_whole_prompt(start_worker: Start, transport: str) -> None:
    p, d = pair(start_worker, transport)
    r = record("s", PROMPT, n=2, max_tokens=6)
    p.tell(Submit(r, hand_over=True))
    last = p.wait(Offered, lambda m: m.record is not None)  # whoever was told of the chunks has died
    adopt(d, last)
    fetched = d.wait(Fetched)
    assert (fetched.ok, fetched.n_bytes) == (True, 12 * 16)
    check_same(r, p, d)
    assert d.engine.runner.n_tokens <= 2 * 6  # nothing of the prompt
    p.tell(Release([o.offer.move_id for o in p.all(Offered)]))
    check_clean(p, d)


def test_last_offer_brings_what_a_failed_chunk_did_not(start_worker: Start) -> None:
    p, d = pair(start_worker)
    r = record("s", PROMPT, max_tokens=8)
    p.tell(Submit(r, hand_over=True))
    last = p.wait(Offered, lambda m: m.record is not None)
    first, second = (o.offer for o in p.all(Offered)[:-1])
    d.tell(Fetch("s", first), Fetch("s", replace(second, owner="nobody")))
    adopt(d, last)
    fetched = {m.move_id: m for m in (d.wait(Fetched) for _ in range(3))}
    assert [fetched[o.move_id].ok for o in (first, second, last.offer)] == [True, False, True]
    assert fetched[last.offer.move_id].n_bytes == 8 * 16  # the first four pages are there
    check_same(r, p, d)
    assert d.engine.runner.n_tokens <= 8
    p.tell(Release([o.offer.move_id for o in p.all(Offered)]))
    check_clean(p, d)


def test_pages_that_are_there_already_are_not_read(start_worker: Start) -> None:
    p, d = pair(start_worker)
    d.tell(Submit(record("before", PROMPT[:30], max_tokens=1)))
    d.wait_end("before")
    r = record("s", PROMPT, max_tokens=5)
    _, fetched = hand_over(p, d, r)
    assert all(f.ok for f in fetched)
    assert sum(f.n_bytes for f in fetched) == (12 - 7) * 16  # 30 tokens fill 7 pages
    check_same(r, p, d)
    check_clean(p, d)


def test_session_whose_first_token_ends_it_is_not_handed_over(start_worker: Start) -> None:
    p, _ = pair(start_worker)
    p.tell(Submit(record("s", PROMPT, max_tokens=1), hand_over=True))
    assert p.wait_end("s") == "length"
    p.tell(Release([o.offer.move_id for o in p.all(Offered)]))
    check_clean(p)
    assert all(o.record is None for o in p.all(Offered))


def test_many_sessions_at_once(start_worker: Start) -> None:
    p, d = pair(start_worker, "shm", n_pages=200)
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


@pytest.mark.parametrize("transport", KINDS)
@pytest.mark.parametrize("n", [1, 4])
def test_running_session_moves_and_says_the_same(start_worker: Start, transport: str, n: int) -> None:
    a, b = start_worker("a", transport, step_s=0.005), start_worker("b", transport)
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


@pytest.mark.parametrize("transport", KINDS)
def test_pages_of_a_running_session_go_ahead_of_it(start_worker: Start, transport: str) -> None:
    a, b = start_worker("a", transport, step_s=0.005), start_worker("b", transport)
    introduce(a, b)
    r = record("s", PROMPT, max_tokens=60)
    a.tell(Submit(r), Submit(record("short", PROMPT[:2], max_tokens=60)))
    a.until(lambda: len(a.tokens("s")) >= 1)
    a.tell(Announce(["unknown", "short", "s"]))
    ahead = [a.wait(Offered) for _ in range(2)]
    assert [(o.session_id, o.record) for o in ahead] == [("short", None), ("s", None)]
    assert len(ahead[0].offer.pages) <= 1 and len(ahead[1].offer.pages) >= 11
    b.tell(Fetch("s", ahead[1].offer))
    assert b.wait(Fetched).n_bytes == len(ahead[1].offer.pages) * 16
    later = a.wait(Offered, lambda m: m.session_id == "s")  # it goes on, and fills another page
    assert later.record is None and later.offer.first_token == ahead[1].offer.n_tokens
    a.tell(Export(["s"]))
    last = a.wait(Offered, lambda m: m.record is not None)
    adopt(b, last)
    n_left = len(last.offer.pages) - len(ahead[1].offer.pages)
    assert b.wait(Fetched).n_bytes == n_left * 16
    check_same(r, a, b)
    a.tell(Export(["short"]))
    a.wait(Offered, lambda m: m.record is not None)
    a.tell(Release([o.offer.move_id for o in a.all(Offered)]))
    check_clean(a, b)


def test_session_comes_back_to_where_it_was(start_worker: Start) -> None:
    a, b = start_worker("a", step_s=0.005), start_worker("b", step_s=0.005)
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


def test_waiting_session_is_exported_without_pages(start_worker: Start) -> None:
    a, b = pair(start_worker, max_num_seqs=1)
    a.engine.gate.clear()
    a.tell(Submit(record("first", PROMPT, max_tokens=60)), Submit(record("s", PROMPT[:9], max_tokens=8)))
    a.tell(Export(["s"]))
    offered = a.wait(Offered)
    assert (offered.session_id, offered.offer.pages) == ("s", [])
    adopt(b, offered)
    check_same(record("s", PROMPT[:9], max_tokens=8), b)


def test_session_leaves_without_waiting_for_another_step(start_worker: Start) -> None:
    a = start_worker("a")
    a.tell(Submit(record("other", PROMPT, max_tokens=80)), Submit(record("s", PROMPT, max_tokens=80)))
    a.until(lambda: len(a.tokens("s")) >= 3)
    a.engine.gate.clear()  # no step begins from now on
    a.tell(Export(["s"]))
    offered = a.wait(Offered)
    assert offered.record is not None and offered.record.output_ids == a.tokens("s")
    a.engine.gate.set()
    a.tell(Release([offered.offer.move_id]))
    check_clean(a)


def test_next_step_waits_a_little_for_a_session_whose_pages_are_almost_here(start_worker: Start) -> None:
    a = start_worker("a", "shm")
    b = start_worker("b", lambda pages, board: LateShm(pages, board, 0.01), step_s=0.5)
    introduce(a, b)
    b.tell(Submit(record("other", PROMPT, max_tokens=40)))
    b.until(lambda: len(b.tokens("other")) >= 1)
    a.tell(Submit(record("s", PROMPT, max_tokens=12), hand_over=True))
    adopt(b, a.wait(Offered, lambda m: m.record is not None))
    b.until(lambda: len(b.tokens("s")) >= 1)
    told = b.wait(Fetched)
    with b.channel.news:
        sent = list(b.channel.sent)
    after = [m for m in sent[sent.index(told) :] if isinstance(m, StepEvents)]
    assert any(e.session_id == "s" for e in after[0].events)
    b.tell(Abort(["s", "other"]))
    a.tell(Release([o.offer.move_id for o in a.all(Offered)]))
    check_clean(a, b)


class LateShm(ShmTransport):
    """Tells the ends of its reads late."""

    def __init__(self, pages: Pages, board: Board, late_s: float) -> None:
        super().__init__(pages, board)
        self._late_s = late_s
        self._ended: list[tuple[float, Done]] = []

    def poll(self) -> list[Done]:
        now_s = time.monotonic()
        self._ended += [(now_s + self._late_s, done) for done in super().poll()]
        out = [done for at_s, done in self._ended if at_s <= now_s]
        self._ended = [e for e in self._ended if e[0] > now_s]
        return out
