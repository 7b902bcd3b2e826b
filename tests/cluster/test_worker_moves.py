"""Sessions and pages between two worker loops: same tokens as alone, pages moved once, nothing left pinned."""

import pytest
from worker_pair import KINDS, PROMPT, Start, adopt, check_clean, check_same, hand_over, introduce, pair

from kilat.base.ids import branch_id
from kilat.wire.messages import (
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
    assert spans == [(0, 16), (16, 32), (32, 45)]
    assert [len(o.offer.pages) for o in offers] == [4, 4, 4]
    assert sum(f.n_bytes for f in fetched) == 12 * 16  # 45 tokens are 12 pages of 4 tokens
    assert len({f.move_id for f in fetched}) == 3
    check_same(r, p, d)


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
