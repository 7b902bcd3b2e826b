"""How one token budget is shared between decode rows and prefill chunks."""

import pytest

from kilat.base.errors import EngineError
from kilat.policy.sched.plan import StepResult
from tests.policy.sched.fakes import Rig, alone, shape

pytestmark = pytest.mark.logic


def test_prompt_takes_as_many_chunks_as_the_budget_needs():
    rig = Rig(max_step_tokens=5)
    r = rig.submit("a", range(13), max_tokens=2)
    rig.run()
    assert [shape(p) for p in rig.plans] == [[("a", 0, 5)], [("a", 5, 5)], [("a", 10, 3)], [("a", 13, 1)]]
    assert [row.sample for p in rig.plans for row in p.rows] == [False, False, True, True]
    assert rig.output["a"] == alone(r, 0, 128)[0]


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 16, 100])
@pytest.mark.parametrize("depth", [1, 2])
def test_output_does_not_depend_on_the_chunk_size(budget: int, depth: int):
    rig = Rig(max_step_tokens=budget, depth=depth)
    records = [rig.submit(f"s{i}", range(i, i + 9 + i), seed=i) for i in range(4)]
    rig.run()
    for r in records:
        assert rig.output[r.session_id] == alone(r, 0, 128)[0]
    assert max(p.n_tokens for p in rig.plans) <= budget


def test_decode_rows_come_first_and_prefill_gets_what_is_left():
    rig = Rig(max_step_tokens=6)
    rig.submit("a", [1, 2], max_tokens=10)
    rig.submit("b", [3], max_tokens=10)
    rig.step()
    rig.submit("c", range(20))
    assert shape(rig.step()) == [("a", 2, 1), ("b", 1, 1), ("c", 0, 4)]


def test_decode_is_never_starved_by_prompts_of_higher_priority():
    rig = Rig(max_step_tokens=4)
    rig.submit("a", [1], max_tokens=30)
    rig.step()
    for i in range(5):
        rig.submit(f"long{i}", range(40), priority=9)
    for _ in range(20):
        assert "a" in [row[0] for row in shape(rig.step())]


def test_small_budget_bounds_the_sessions_that_run():
    rig = Rig(max_step_tokens=3, max_num_seqs=8)
    for i in range(6):
        rig.submit(f"s{i}", [i], max_tokens=5)
    rig.run()
    assert max(len(p.rows) for p in rig.plans) == 3
    assert len(rig.finish) == 6


def test_no_more_sessions_run_than_allowed():
    rig = Rig(max_num_seqs=2)
    for i in range(5):
        rig.submit(f"s{i}", [i], max_tokens=3)
    rig.step()
    assert rig.gauge("kilat_sessions_running") == 2
    assert rig.gauge("kilat_sessions_waiting") == 3
    rig.run()
    assert max(len(p.rows) for p in rig.plans) == 2


def test_several_prompts_share_a_step():
    rig = Rig(max_step_tokens=10)
    rig.submit("a", range(4))
    rig.submit("b", range(4))
    rig.submit("c", range(4))
    assert shape(rig.step()) == [("a", 0, 4), ("b", 0, 4), ("c", 0, 2)]


def test_admitted_names_a_session_once_with_all_its_tokens():
    rig = Rig(max_step_tokens=4)
    rig.submit("a", range(10), max_tokens=3)
    rig.run()
    [admitted] = [a for p in rig.plans for a in p.admitted]
    assert rig.plans[0].admitted == [admitted]
    assert (admitted.session_id, admitted.token_ids, admitted.n_prompt) == ("a", list(range(10)), 10)
    assert admitted.params.max_tokens == 3 and admitted.seed == 7


def test_gone_names_finished_and_aborted_sessions_in_the_next_plan():
    rig = Rig()
    rig.submit("a", [1], max_tokens=1)
    rig.submit("b", [2], max_tokens=9)
    rig.submit("c", [3], max_tokens=9)
    rig.step()
    rig.abort("c")
    assert sorted(rig.step().gone) == ["a", "c"]
    assert rig.step().gone == []


def test_session_that_never_ran_is_not_gone():
    rig = Rig(max_num_seqs=1)
    rig.submit("a", [1], max_tokens=9)
    rig.submit("b", [2])
    rig.step()
    rig.abort("b")
    assert rig.step().gone == []


def test_steps_are_numbered_one_by_one():
    rig = Rig()
    rig.submit("a", [1], max_tokens=4)
    rig.run()
    assert [p.step for p in rig.plans] == [0, 1, 2, 3]


def test_idle_scheduler_plans_nothing():
    rig = Rig()
    assert rig.plan() is None and not rig.scheduler.has_work
    rig.submit("a", [1])
    assert rig.scheduler.has_work
    rig.abort("a")
    assert rig.plan() is None and not rig.scheduler.has_work


def test_target_time_bounds_the_prefill_share_of_a_step():
    rig = Rig(max_step_tokens=1000, max_model_len=2000, n_pages=1000, target_step_s=0.01)
    rig.submit("d", [1], max_tokens=50)
    rig.submit("a", range(100), max_tokens=1)
    rig.step()  # 101 tokens in 0.01 s: 88 in what a step aims at
    rig.submit("b", range(900, 1800), max_tokens=1)
    shares = [shape(rig.step()) for _ in range(3)]
    assert shares[0] == [("d", 1, 1), ("b", 0, 88)]
    assert [s[0][0] for s in shares] == ["d"] * 3


def test_prefill_makes_a_page_of_progress_whatever_the_target():
    rig = Rig(max_step_tokens=64, target_step_s=1e-9)
    rig.submit("d", [1], max_tokens=30)
    rig.submit("a", range(40), max_tokens=1)
    rig.step()
    rig.submit("b", range(50, 90), max_tokens=1)
    assert [shape(rig.step())[1][2] for _ in range(2)] == [4, 4]
    rig.run()
    assert len(rig.finish) == 3


def test_without_a_stream_to_protect_the_budget_alone_decides():
    rig = Rig(max_step_tokens=64, max_model_len=200, target_step_s=1e-9)
    rig.submit("a", range(40), max_tokens=1)
    rig.step()
    rig.submit("b", range(50, 150), max_tokens=1)
    assert [shape(rig.step()) for _ in range(2)] == [[("b", 0, 64)], [("b", 64, 36)]]


def test_more_plans_than_the_depth_are_a_mistake():
    rig = Rig()
    rig.submit("a", [1])
    rig.plan()
    with pytest.raises(EngineError, match="outstanding"):
        rig.scheduler.plan(0.0)


def test_result_of_another_plan_is_refused_and_changes_nothing():
    rig = Rig(depth=2)
    rig.submit("a", [1], max_tokens=5)
    rig.plan()
    rig.plan()
    plan, result = rig.in_flight[1]
    with pytest.raises(EngineError, match="oldest"):
        rig.scheduler.commit(plan, result, 0.0)
    with pytest.raises(EngineError, match="rows"):
        rig.scheduler.commit(rig.in_flight[0][0], StepResult([]), 0.0)
    rig.commit()
    rig.run()
    assert len(rig.output["a"]) == 5
