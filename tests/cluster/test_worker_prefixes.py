"""Prefixes that one worker loop lends to another, and the news of what it holds."""

import pytest
from msgspec.structs import replace
from worker_pair import (
    KINDS,
    PROMPT,
    Start,
    Worker,
    adopt,
    check_clean,
    check_same,
    introduce,
    pair,
)

from kilat.policy.route.index import PrefixIndex
from kilat.wire.messages import (
    Fetch,
    Fetched,
    Lend,
    Offered,
    PagesChanged,
    Ping,
    Release,
    Resync,
    Status,
    StepEvents,
    Submit,
)
from tests.policy.sched.fakes import record

pytestmark = pytest.mark.logic


@pytest.mark.parametrize("transport", KINDS)
def test_prefix_that_a_peer_holds_is_a_hit(start_worker: Start, transport: str) -> None:
    a, b = pair(start_worker, transport)
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


def test_status_tells_the_number_of_the_last_change(start_worker: Start) -> None:
    a = start_worker("a")
    a.tell(Ping())
    assert a.wait(Status, lambda m: m.step == 0 and not m.busy).pages_seq == -1
    a.tell(Resync(), Submit(record("s", PROMPT, max_tokens=8)))
    a.wait_end("s")
    a.until(lambda: not a.engine.has_work)
    a.tell(Ping())
    status = a.wait(Status, lambda m: m.step > 0)
    assert status.pages_seq == a.all(PagesChanged)[-1].seq > 0


def test_pages_of_a_prompt_are_told_before_its_first_token(start_worker: Start) -> None:
    a = start_worker("a")
    a.tell(Resync(), Submit(record("s", PROMPT, max_tokens=3)))
    a.wait_end("s")
    with a.channel.news:
        sent = list(a.channel.sent)
    first = next(i for i, m in enumerate(sent) if isinstance(m, StepEvents) and m.events[0].token_ids)
    known = [n for m in sent[:first] if isinstance(m, PagesChanged) for n in m.stored]
    assert len(known) == len(PROMPT) // 4


def prefix_names(w: Worker) -> list[bytes]:
    """Names of the full pages of PROMPT, from its start."""
    told = [m for m in w.all(PagesChanged) if m.stored]
    return [name for m in told for name in m.stored][: len(PROMPT) // 4]


def test_unknown_prefix_is_answered_without_pages(start_worker: Start) -> None:
    a, b = pair(start_worker)
    a.tell(Lend("m1", [b"x" * 16]))
    offered = a.wait(Offered)
    assert offered.offer.pages == []
    r = record("s", PROMPT, max_tokens=8)
    b.tell(Submit(r, prefix=offered.offer))
    assert b.wait(Fetched).ok
    check_same(r, b)
    a.tell(Release(["m1"]))
    check_clean(a, b)


def test_prefix_whose_names_are_missing_is_computed(start_worker: Start) -> None:
    a, b = pair(start_worker)
    a.tell(Resync(), Submit(record("first", PROMPT, max_tokens=1)))
    a.wait_end("first")
    a.tell(Lend("m1", prefix_names(a)), Lend("m1", []))
    offered = a.wait(Offered)
    r = record("s", PROMPT, max_tokens=8)
    b.tell(Submit(r, prefix=replace(offered.offer, names=offered.offer.names[1:])))
    assert not b.wait(Fetched).ok
    check_same(r, b)
    assert len(a.all(Offered)) == 1


def test_prefix_and_hand_over_together(start_worker: Start) -> None:
    a, b = pair(start_worker)
    c = start_worker("c")
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


def test_index_that_follows_the_news_knows_what_the_worker_holds(start_worker: Start) -> None:
    a = start_worker("a", n_pages=16, max_model_len=60)
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


def test_hello_tells_layout_and_endpoints(start_worker: Start) -> None:
    a = start_worker("a", "tcp")
    assert a.hello.layout == a.engine.pages.layout
    assert [e.transport for e in a.hello.endpoints] == ["tcp"]
