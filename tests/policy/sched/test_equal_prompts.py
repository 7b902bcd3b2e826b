"""Sessions that start at the same time with the same prompt: one computes it, the others take its pages."""

import pytest

from kilat.policy.sched.draft import MAX_ASIDE
from tests.policy.sched.fakes import Rig, alone, shape

pytestmark = pytest.mark.logic
PROMPT = list(range(13))  # three pages and one token


def test_equal_prompts_of_one_step_are_computed_once():
    rig = Rig()
    records = [rig.submit(f"s{i}", PROMPT) for i in range(4)]
    rig.run()
    assert shape(rig.plans[0]) == [("s0", 0, 13)]
    assert shape(rig.plans[1]) == [("s0", 13, 1), *((f"s{i}", 12, 1) for i in (1, 2, 3))]
    for r in records:
        assert rig.output[r.session_id] == alone(r, 0, 128)[0]


def test_only_the_part_that_is_shared_is_waited_for():
    rig = Rig(max_step_tokens=5)
    rig.submit("a", PROMPT)
    rig.submit("b", [*PROMPT[:8], *[50] * 9])
    rig.run()
    b = [row for p in rig.plans for row in shape(p) if row[0] == "b"]
    assert b[0][1] == 8
    first = next(i for i, p in enumerate(rig.plans) if any(r.session_id == "b" for r in p.rows))
    assert first == 2, "eight tokens are committed after two steps"


@pytest.mark.parametrize("other", [PROMPT[:3], [*PROMPT[:3], 9, 9, 9], [9, *PROMPT]])
def test_less_than_a_page_in_common_is_not_waited_for(other: list[int]):
    rig = Rig()
    rig.submit("a", PROMPT)
    rig.submit("b", other)
    rig.step()
    assert [r.session_id for r in rig.plans[0].rows] == ["a", "b"]


@pytest.mark.parametrize("apart", [{"salt": "other"}, {"priority": 1}, {"prompt_logprobs": 0}])
def test_other_salt_higher_priority_and_prompt_logprobs_do_not_wait(apart: dict):
    rig = Rig(depth=2)
    rig.submit("a", PROMPT)
    rig.plan()
    rig.submit("b", PROMPT, **apart)
    rig.plan()
    assert ("b", 0, 13) in shape(rig.plans[1])


def test_without_a_prefix_cache_nobody_waits():
    rig = Rig(prefix_cache=False)
    rig.submit("a", PROMPT)
    rig.submit("b", PROMPT)
    rig.step()
    assert len(rig.plans[0].rows) == 2


def test_others_behind_a_waiting_one_start():
    rig = Rig(max_step_tokens=64)
    rig.submit("a", PROMPT, arrival_s=0.0)
    rig.submit("same", PROMPT, arrival_s=1.0)
    rig.submit("other", [40] * 6, arrival_s=2.0)
    rig.step()
    assert [r.session_id for r in rig.plans[0].rows] == ["a", "other"]
    rig.run()


def test_it_goes_on_alone_when_the_first_one_is_gone():
    rig = Rig(max_step_tokens=5)
    rig.submit("a", PROMPT)
    r = rig.submit("b", PROMPT)
    rig.step()
    rig.abort("a")
    rig.step()
    assert shape(rig.plans[1])[0][:2] == ("b", 4)
    rig.run()
    assert rig.output["b"] == alone(r, 0, 128)[0]


def test_a_session_is_not_held_up_by_what_another_one_generates():
    rig = Rig()
    r = rig.submit("a", PROMPT, max_tokens=20)
    for _ in range(2):
        rig.step()
    rig.submit("b", [*PROMPT, *alone(r, 0, 128)[0]][:20])  # the next page of "a", not known yet
    rig.step()
    assert "b" in [x.session_id for x in rig.plans[-1].rows]
    rig.run()


def test_one_plan_looks_at_a_bounded_number_of_waiting_sessions():
    rig = Rig(max_num_seqs=64, max_step_tokens=64)
    rig.submit("a", PROMPT, arrival_s=0.0)
    for i in range(MAX_ASIDE + 3):
        rig.submit(f"b{i}", PROMPT, arrival_s=1.0)
    rig.submit("last", [40] * 6, arrival_s=2.0)
    rig.step()
    assert shape(rig.plans[0]) == [("a", 0, 13)]
    rig.run()
    assert len(rig.finish) == MAX_ASIDE + 5
