"""Sessions that leave a scheduler, with their pages."""

import pytest
from msgspec.structs import replace

from kilat.base import metrics
from kilat.base.errors import EngineError, NotFoundError
from kilat.policy.sched.moves import Arrived, Departed
from tests.policy.sched.fakes import Rig, alone, record
from tests.policy.sched.moving import PROMPT, adopt, handed_over, rows_of

pytestmark = pytest.mark.logic


@pytest.mark.parametrize("depth", [1, 2])
def test_handed_over_session_stops_after_its_first_token_and_that_one_is_sent(depth: int):
    rig = Rig(depth=depth)
    r = rig.submit("a", PROMPT, hand_over=True, max_tokens=8)
    for _ in range(5):
        rig.step()
    assert rig.output["a"] == alone(r, 0, 128)[0][:1]
    assert rows_of(rig, "a") == [(0, 10)]
    assert rig.scheduler.take_frozen() == ["a"]
    assert rig.scheduler.take_frozen() == []
    assert rig.scheduler.has_work


def test_runner_forgets_a_frozen_session_so_that_it_may_come_back():
    rig = Rig()
    r, gone = handed_over(rig)
    rig.scheduler.submit(replace(gone.record, epoch=1), rig.now_s, Arrived(gone.pages, gone.n_tokens))
    rig.run()
    assert rig.plans[1].gone == ["a"]
    assert rows_of(rig, "a")[1] == (10, 1)
    assert rig.output["a"] == alone(r, 0, 128)[0]
    assert rig.gauge(metrics.PAGES_USED) == 0


def test_departed_session_leaves_no_event_and_its_pages_stay_pinned():
    rig = Rig()
    r, gone = handed_over(rig, max_tokens=8)
    output = alone(r, 0, 128)[0]
    assert gone.record.output_ids == output[:1]
    assert (gone.record.prompt_ids, gone.record.epoch) == (PROMPT, 0)
    assert (gone.n_tokens, len(gone.pages)) == (10, 3)
    assert rig.finish == {} and not rig.scheduler.has_work
    assert rig.gauge(metrics.PAGES_USED) == rig.gauge(metrics.PAGES_PINNED) == 3
    assert rig.counter(metrics.SESSIONS_DEPARTED) == 1
    written = [t for page in gone.pages for t in rig.runner.kv[page]]
    assert written[:10] == PROMPT
    rig.scheduler.unpin(gone.pages)
    rig.scheduler.check()
    assert rig.gauge(metrics.PAGES_USED) == 0
    with pytest.raises(NotFoundError):
        rig.scheduler.depart("a")


def test_pages_of_a_departed_session_are_still_found_by_others():
    rig = Rig()
    _, gone = handed_over(rig)
    rig.scheduler.unpin(gone.pages)
    rig.submit("b", PROMPT)
    rig.run()
    assert rows_of(rig, "b")[0] == (8, 2)


@pytest.mark.parametrize("end", [{"max_tokens": 1}, {"stop_token_ids": tuple(range(97))}])
def test_first_token_that_ends_the_session_just_ends_it(end: dict):
    rig = Rig()
    rig.submit("a", PROMPT, hand_over=True, **end)
    rig.run()
    assert set(rig.finish) == {"a"}
    assert rig.scheduler.take_frozen() == []
    assert rig.gauge(metrics.PAGES_USED) == 0


def test_handed_over_session_that_was_preempted_comes_back_and_is_frozen():
    rig = Rig(max_step_tokens=4)
    rig.submit("a", PROMPT, hand_over=True)
    rig.step()
    roster = rig.scheduler._roster
    roster.preempt(roster.running[0])
    for _ in range(4):
        rig.step()
    assert rig.scheduler.take_frozen() == ["a"]


def test_frozen_while_rows_are_in_flight_it_departs_when_they_are_back():
    rig = Rig(depth=2)
    r = rig.submit("a", PROMPT, max_tokens=9)
    rig.plan()
    rig.plan()
    rig.scheduler.freeze("a")
    rig.scheduler.freeze("a")
    assert rig.scheduler.take_frozen() == []
    with pytest.raises(EngineError, match="in flight"):
        rig.scheduler.depart("a")
    rig.commit()
    assert rig.plan() is None
    assert rig.scheduler.take_frozen() == []
    rig.commit()
    assert rig.scheduler.take_frozen() == ["a"]
    gone = rig.scheduler.depart("a")
    assert gone.record.output_ids == rig.output["a"] == alone(r, 0, 128)[0][:2]
    assert gone.n_tokens == 11


def test_session_that_ends_with_a_row_in_flight_is_not_told_as_frozen():
    rig = Rig(depth=2)
    rig.submit("a", PROMPT, max_tokens=2)
    rig.plan()
    rig.plan()
    rig.scheduler.freeze("a")
    rig.commit()
    rig.commit()
    assert rig.finish == {"a": "length"}
    assert rig.scheduler.take_frozen() == []
    assert not rig.scheduler.has_work


@pytest.mark.parametrize("hand_over", [True, False])
def test_frozen_session_can_be_aborted(hand_over: bool):
    rig = Rig()
    rig.submit("a", PROMPT, hand_over=hand_over)
    rig.step()
    if not hand_over:
        rig.scheduler.freeze("a")
    assert [e.finish for e in rig.abort("a")] == ["abort"]
    assert rig.scheduler.take_frozen() == []
    assert rig.gauge(metrics.PAGES_USED) == 0


def test_waiting_session_departs_without_pages():
    rig = Rig()
    r = rig.submit("a", PROMPT)
    rig.scheduler.freeze("a")
    assert rig.plan() is None
    assert rig.scheduler.take_frozen() == ["a"]
    assert rig.scheduler.depart("a") == Departed(r, [], 0)


def test_session_in_the_middle_of_its_prompt_departs_with_what_it_has():
    rig = Rig(max_step_tokens=6)
    rig.submit("a", PROMPT)
    rig.step()
    assert rig.scheduler.computed("a") == (6, rig.plans[0].rows[0].pages[:2])
    gone = rig.scheduler.depart("a")
    assert (gone.n_tokens, len(gone.pages), gone.record.output_ids) == (6, 2, [])
    rig.scheduler.unpin(gone.pages)
    assert rig.gauge(metrics.PAGES_USED) == 0


def test_unknown_sessions_and_samples_that_have_not_started_cannot_leave():
    rig = Rig()
    rig.submit("a", PROMPT, n=2)
    for act in (rig.scheduler.freeze, rig.scheduler.depart):
        for session_id in ("x", "a#1"):
            with pytest.raises(NotFoundError):
                act(session_id)
    with pytest.raises(NotFoundError):
        rig.scheduler.computed("x")
    assert rig.scheduler.computed("a#1") == (0, [])


def test_pages_told_to_a_peer_stay_when_their_session_is_preempted():
    rig = Rig(max_step_tokens=6, n_pages=6)
    rig.submit("a", PROMPT)
    rig.step()
    _, pages = rig.scheduler.computed("a")
    rig.scheduler.pin(pages)
    told = [list(rig.runner.kv[p]) for p in pages]
    roster = rig.scheduler._roster
    roster.preempt(roster.running[0])
    rig.run()
    assert [rig.runner.kv[p] for p in pages] == told
    rig.scheduler.unpin(pages)
    assert rig.gauge(metrics.PAGES_USED) == 0


def test_samples_that_have_not_started_go_with_sample_zero_and_fork_there():
    old, new = Rig(), Rig()
    r, gone = handed_over(old, n=3, max_tokens=6)
    assert gone.record.with_samples and gone.record.n_sessions == 3
    assert not old.scheduler.has_work
    assert old.counter(metrics.SESSIONS_DEPARTED) == 3
    adopt(old, gone, new)
    new.run()
    assert old.output["a"] + new.output["a"] == alone(r, 0, 128)[0]
    for k in (1, 2):
        assert new.output[f"a#{k}"] == alone(r, k, 128)[0]
        assert rows_of(new, f"a#{k}")[0] == (9, 1)
    assert rows_of(new, "a")[0] == (10, 1)
    assert list(old.output) == ["a"]


def test_samples_left_behind_by_the_first_are_handed_over_one_by_one():
    rig = Rig()
    r = record("a", PROMPT, n=3, max_tokens=5)
    first = alone(r, 0, 128)[0][0]
    r = rig.submit("a", PROMPT, n=3, max_tokens=5, stop_token_ids=(first,), hand_over=True)
    for _ in range(4):
        rig.step()
    assert rig.finish == {"a": "stop"}
    assert sorted(rig.scheduler.take_frozen()) == ["a#1", "a#2"]
    new = Rig()
    for k in (1, 2):
        gone = rig.scheduler.depart(f"a#{k}")
        assert (gone.record.branch, gone.record.n_sessions) == (k, 1)
        adopt(rig, gone, new)
    new.run()
    for k in (1, 2):
        assert rig.output[f"a#{k}"] + new.output[f"a#{k}"] == alone(r, k, 128)[0]
