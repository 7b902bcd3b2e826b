"""Routing of events to requests: order, epochs, bounds and ends."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.base.errors import CapacityError, KilatError, PeerError
from kilat.cluster.gateway.sessions import Inbox, SessionTable
from kilat.wire.messages import SessionEvent

pytestmark = pytest.mark.logic


def event(
    seq: int, *, session: str = "s", epoch: int = 0, ids: tuple[int, ...] = (1,), finish: str | None = None
):
    return SessionEvent(session, epoch, seq, list(ids), finish=finish)


def seqs(inbox: Inbox) -> list[int]:
    return [e.seq for _, e in asyncio.run(_take(inbox))]


async def _take(inbox: Inbox) -> list[tuple[int, SessionEvent]]:
    return await asyncio.wait_for(inbox.take(), 5)


def test_take_returns_everything_that_was_pushed_since_the_last_take() -> None:
    inbox = Inbox()
    inbox.push(0, event(0))
    inbox.push(1, event(0, session="s#1"))
    assert [(i, e.session_id) for i, e in asyncio.run(_take(inbox))] == [(0, "s"), (1, "s#1")]


async def test_take_waits_for_a_push() -> None:
    inbox = Inbox()
    waiting = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    inbox.push(0, event(0))
    assert len(await asyncio.wait_for(waiting, 5)) == 1


async def test_nudge_wakes_a_waiting_take_with_nothing_and_is_forgotten_otherwise() -> None:
    inbox = Inbox()
    inbox.nudge()
    waiting = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    assert not waiting.done(), "a nudge that nobody waited for must not count later"
    inbox.nudge()
    assert await asyncio.wait_for(waiting, 5) == []


async def test_cancelled_take_leaves_the_inbox_usable() -> None:
    inbox = Inbox()
    waiting = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    inbox.push(0, event(0))
    assert len(await _take(inbox)) == 1


def test_failed_inbox_delivers_what_it_has_before_it_raises() -> None:
    inbox = Inbox()
    inbox.push(0, event(0))
    inbox.fail(PeerError("gone"))
    assert not inbox.push(0, event(1))
    assert seqs(inbox) == [0]
    with pytest.raises(PeerError, match="gone"):
        seqs(inbox)


def test_first_failure_wins() -> None:
    inbox = Inbox()
    inbox.fail(PeerError("first"))
    inbox.fail(CapacityError("second"))
    with pytest.raises(KilatError, match="first"):
        seqs(inbox)


def test_reader_that_falls_behind_fails_its_inbox_and_is_counted_once() -> None:
    table, inbox = SessionTable(), Inbox(max_tokens=3)
    table.add("s", inbox, 0)
    table.add("s#1", inbox, 1)
    assert table.deliver([event(0, ids=(1, 2))]) == []
    assert table.deliver([event(1, ids=(3, 4)), event(0, session="s#1")]) == ["s", "s#1"]
    assert len(table) == 0
    assert table.slow_readers == 1
    assert seqs(inbox) == [0, 1]
    with pytest.raises(CapacityError, match="limit 3"):
        seqs(inbox)


def test_tokens_that_were_taken_do_not_count_against_the_bound() -> None:
    inbox = Inbox(max_tokens=2)
    for k in range(10):
        assert inbox.push(0, event(k, ids=(1, 2)))
        assert seqs(inbox) == [k]


def test_event_of_an_old_epoch_is_dropped() -> None:
    table, inbox = SessionTable(), Inbox()
    table.add("s", inbox, 0, epoch=2)
    table.deliver([event(0, epoch=1), event(0, epoch=2), event(1, epoch=3)])
    assert seqs(inbox) == [0]
    assert table.stale_events == 2


def test_repeated_event_is_dropped() -> None:
    table, inbox = SessionTable(), Inbox()
    table.add("s", inbox, 0)
    table.deliver([event(0), event(0), event(1), event(0)])
    assert seqs(inbox) == [0, 1]


def test_lost_event_ends_the_session_with_an_error() -> None:
    table, inbox = SessionTable(), Inbox()
    table.add("s", inbox, 0)
    assert table.deliver([event(0), event(2)]) == ["s"]
    assert seqs(inbox) == [0]
    with pytest.raises(PeerError, match="lost"):
        seqs(inbox)


def test_event_of_nobody_is_counted_and_dropped() -> None:
    table = SessionTable()
    assert table.deliver([event(0)]) == []
    assert table.stale_events == 1


def test_finished_session_leaves_the_table() -> None:
    table, inbox = SessionTable(), Inbox()
    table.add("s", inbox, 0)
    table.deliver([event(0, finish="stop")])
    assert "s" not in table
    assert not table.remove("s")


def test_refused_session_fails_its_request() -> None:
    table, inbox = SessionTable(), Inbox()
    table.add("s", inbox, 0)
    table.fail("s", CapacityError("full"))
    table.fail("unknown", CapacityError("full"))
    with pytest.raises(CapacityError, match="full"):
        seqs(inbox)


def test_fail_all_ends_every_request() -> None:
    table, inboxes = SessionTable(), [Inbox(), Inbox()]
    for k, inbox in enumerate(inboxes):
        table.add(f"s{k}", inbox, 0)
    table.fail_all(PeerError("dead"))
    assert len(table) == 0
    for inbox in inboxes:
        with pytest.raises(PeerError, match="dead"):
            seqs(inbox)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=60),
    st.integers(0, 2),
)
def test_whatever_arrives_a_request_sees_each_event_of_its_epoch_once_and_in_order(
    arrivals: list[tuple[int, int]], epoch: int
) -> None:
    table, inbox = SessionTable(), Inbox()
    table.add("s", inbox, 0, epoch=epoch)
    table.deliver([event(seq, epoch=e) for e, seq in arrivals])
    inbox.push(0, event(99))  # so that there is something to take, unless the inbox has failed
    try:
        seen = [s for s in seqs(inbox) if s != 99]
    except KilatError:
        seen = []
    own = [seq for e, seq in arrivals if e == epoch]
    expected = []
    for seq in own:
        if seq > len(expected):
            break
        if seq == len(expected):
            expected.append(seq)
    assert seen == expected
