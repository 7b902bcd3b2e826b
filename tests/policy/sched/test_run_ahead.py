"""Depth 2: step N + 1 is planned while step N is still running."""

import pytest

from kilat.base import metrics
from kilat.policy.sched.plan import PENDING
from kilat.wire.sampling import Grammar
from tests.policy.sched.fakes import Rig, alone, next_token, shape

pytestmark = pytest.mark.logic


def rig2(**config: object) -> Rig:
    return Rig(**{"depth": 2, **config})


def test_token_in_flight_is_planned_as_pending_at_the_next_position():
    rig = rig2()
    r = rig.submit("a", [1, 2, 3])
    rig.plan()
    plan = rig.plan()
    assert shape(plan) == [("a", 3, 1)]
    assert plan.rows[0].token_ids == [PENDING] and plan.rows[0].sample
    rig.run()
    assert rig.output["a"] == alone(r, 0, 128)[0]


def test_chunks_of_one_prompt_follow_each_other_without_a_commit():
    rig = rig2(max_step_tokens=4)
    rig.submit("a", range(10))
    rig.plan()
    assert shape(rig.plan()) == [("a", 4, 4)]


def test_known_token_is_not_pending():
    rig = rig2(max_step_tokens=4)
    rig.submit("a", range(5))
    rig.plan()
    assert rig.plan().rows[0].token_ids == [4]


@pytest.mark.parametrize(
    ("options", "config"), [({"max_tokens": 1}, {}), ({"max_tokens": None}, {"max_model_len": 4})]
)
def test_session_that_certainly_ends_gets_no_further_row(options: dict, config: dict):
    rig = rig2(**config)
    rig.submit("a", [1, 2, 3], **options)
    rig.plan()
    assert rig.plan() is None
    rig.run()
    assert rig.finish["a"] == "length" and len(rig.plans) == 1


def test_session_with_a_grammar_waits_for_its_token():
    rig = rig2()
    r = rig.submit("a", [1, 2, 3], grammar=Grammar("json_object"))
    rig.submit("b", [4, 5], max_tokens=9)
    rig.plan()
    assert shape(rig.plan()) == [("b", 2, 1)]
    rig.commit()
    assert shape(rig.plan()) == [("a", 3, 1), ("b", 3, 1)]
    rig.run()
    assert rig.output["a"] == alone(r, 0, 128)[0]
    assert PENDING not in [r.token_ids[0] for p in rig.plans for r in p.rows if r.session_id == "a"]


def test_row_of_a_session_that_stopped_meanwhile_is_dropped():
    rig = rig2()
    stop = next_token([1, 2, 3], 7)
    rig.submit("a", [1, 2, 3], stop_token_ids=(stop,))
    rig.plan()
    rig.plan()
    [event] = rig.commit()
    assert (event.finish, event.stop_id, event.token_ids) == ("stop", stop, [])
    assert rig.commit() == []
    assert not rig.scheduler.has_work


def test_pages_of_a_stopped_session_return_only_with_its_last_row():
    rig = rig2()
    rig.submit("a", [1, 2, 3], stop_token_ids=(next_token([1, 2, 3], 7),))
    rig.plan()
    rig.plan()
    rig.commit()
    assert rig.gauge(metrics.PAGES_USED) == 1
    rig.commit()
    assert rig.gauge(metrics.PAGES_USED) == 0


@pytest.mark.parametrize("in_flight", [1, 2])
def test_pages_of_an_aborted_session_return_only_with_its_last_row(in_flight: int):
    rig = rig2()
    rig.submit("a", [1, 2, 3])
    for _ in range(in_flight):
        rig.plan()
    [event] = rig.abort("a")
    assert event.finish == "abort"
    for _ in range(in_flight):
        assert rig.gauge(metrics.PAGES_USED) == 1
        assert rig.commit() == []
    assert rig.gauge(metrics.PAGES_USED) == 0 and not rig.scheduler.has_work


def test_new_session_waits_until_pages_in_flight_are_back():
    rig = rig2(n_pages=2, max_model_len=8)
    rig.submit("a", range(5))
    rig.plan()
    rig.abort("a")
    r = rig.submit("b", range(20, 25), max_tokens=2)
    assert rig.plan() is None
    rig.commit()
    plan = rig.plan()
    assert shape(plan) == [("b", 0, 5)] and plan.gone == ["a"]
    rig.run()
    assert rig.output["b"] == alone(r, 0, 8)[0]


def test_id_can_be_used_again_while_a_row_of_its_last_owner_is_in_flight():
    rig = rig2()
    rig.submit("a", [1, 2, 3])
    rig.plan()
    rig.abort("a")
    rig.finish.clear()
    rig.events.clear()
    r = rig.submit("a", [4, 5])
    plan = rig.plan()
    assert plan.gone == ["a"] and [a.session_id for a in plan.admitted] == ["a"]
    rig.run()
    assert rig.output["a"] == alone(r, 0, 128)[0]


def test_ended_session_is_gone_in_the_next_plan_although_a_row_is_in_flight():
    rig = rig2()
    rig.submit("a", [1, 2, 3], stop_token_ids=(next_token([1, 2, 3], 7),))
    rig.submit("b", [4], max_tokens=9)
    rig.plan()
    rig.plan()
    rig.commit()
    assert rig.plan().gone == ["a"]


def test_page_is_sealed_only_when_its_tokens_are_committed():
    rig = rig2()
    rig.submit("a", [1, 2, 3], max_tokens=20)
    rig.plan()
    rig.plan()  # writes the fourth token, whose id nobody here knows
    assert rig.scheduler.export("a").page_hashes == []
    rig.commit()
    assert rig.scheduler.export("a").page_hashes == []
    rig.commit()
    assert len(rig.scheduler.export("a").page_hashes) == 1


def test_more_tokens_than_planned_for_end_that_session_alone():
    rig = rig2(burst=lambda session_id: 2 if session_id == "a" else 1)
    rig.submit("a", [1, 2, 3])
    r = rig.submit("b", [4, 5])
    rig.run()
    assert rig.finish == {"a": "error", "b": "length"}
    assert rig.output["b"] == alone(r, 0, 128)[0]


def test_youngest_session_rests_for_a_step_so_that_it_can_be_preempted():
    """The fourth page goes to "b" just before "a" needs one. Both always have a row in flight, so without the rest "b" could not be
    preempted before its page is full."""
    rig = rig2(n_pages=4, page_tokens=4, max_model_len=16, max_num_seqs=2)
    records = [rig.submit("a", [1, 2, 3, 4], max_tokens=12), rig.submit("b", [5], max_tokens=12)]
    rig.run()
    assert rig.counter(metrics.PREEMPTIONS) == 1
    assert [p.step for p in rig.plans if "a" in [row[0] for row in shape(p)]] == list(range(12))
    for r in records:
        assert rig.output[r.session_id] == alone(r, 0, 16)[0]


def test_nobody_is_preempted_while_pages_are_on_their_way_back():
    rig = rig2(n_pages=8, page_tokens=1, max_model_len=8)
    rig.submit("x", [1, 2, 3])
    rig.submit("a", [4], max_tokens=4)
    rig.submit("b", [5], max_tokens=2, grammar=Grammar("json_object"))
    rig.plan()
    rig.plan()
    rig.commit()
    rig.abort("x")  # its row is in flight: 4 pages; "a" takes the last free one
    assert shape(rig.plan()) == [("a", 2, 1)]
    rig.commit()
    assert [row[0] for row in shape(rig.plan())] == ["a", "b"]
    rig.run()
    assert rig.counter(metrics.PREEMPTIONS) == 0
