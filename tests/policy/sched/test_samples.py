"""n > 1: one prefill, then samples that share its full pages."""

import pytest

from kilat.base import metrics
from kilat.base.hashing import branch_seed
from kilat.base.ids import branch_id
from tests.policy.sched.fakes import Rig, alone, shape

pytestmark = pytest.mark.logic


def expect_all(rig: Rig, record, limit: int = 128) -> None:
    for k in range(record.params.n):
        assert rig.output[branch_id(record.session_id, k)] == alone(record, k, limit)[0]


@pytest.mark.parametrize("n_prompt", [1, 2, 4, 5, 6, 8, 9, 13])
@pytest.mark.parametrize("depth", [1, 2])
def test_samples_equal_sessions_that_run_alone(n_prompt: int, depth: int):
    rig = Rig(depth=depth)
    r = rig.submit("a", range(n_prompt), n=4)
    rig.run()
    expect_all(rig, r)
    assert len({tuple(rig.output[branch_id("a", k)]) for k in range(4)}) > 1


def test_samples_fork_when_the_prompt_is_committed():
    rig = Rig(max_step_tokens=8)
    rig.submit("a", range(11), n=3)
    assert shape(rig.step()) == [("a", 0, 8)]
    assert shape(rig.step()) == [("a", 8, 3)]
    plan = rig.step()
    assert shape(plan) == [("a", 11, 1), ("a#1", 10, 1), ("a#2", 10, 1)]
    assert all(r.sample for r in plan.rows)


def test_full_pages_are_shared_and_the_partial_one_is_copied():
    rig = Rig()
    rig.submit("a", range(11), n=3)
    rig.step()
    plan = rig.step()
    pages = {r.session_id: r.pages for r in plan.rows}
    assert pages["a"][:2] == pages["a#1"][:2] == pages["a#2"][:2]
    assert plan.copies == [(pages["a"][2], pages["a#1"][2]), (pages["a"][2], pages["a#2"][2])]
    assert rig.gauge(metrics.PAGES_USED) == 3 + 1 + 1


def test_nothing_is_copied_when_only_full_pages_are_shared():
    rig = Rig()
    rig.submit("a", range(9), n=2)
    rig.step()
    plan = rig.step()
    assert plan.copies == []
    pages = {r.session_id: r.pages for r in plan.rows}
    assert pages["a"][:2] == pages["a#1"][:2] and pages["a"][2] != pages["a#1"][2]


def test_sample_needs_room_for_its_own_pages_only():
    rig = Rig(n_pages=5)  # three for the prompt, one for the sample, one that the first sample may need next
    rig.submit("a", range(11), n=2)
    rig.step()
    assert shape(rig.step()) == [("a", 11, 1), ("a#1", 10, 1)]


def test_every_sample_has_its_own_seed_and_id():
    rig = Rig()
    rig.submit("a", range(5), n=3, seed=99)
    rig.run()
    admitted = {a.session_id: a.seed for p in rig.plans for a in p.admitted}
    assert admitted == {branch_id("a", k): branch_seed(99, k) for k in range(3)}


def test_samples_cost_one_prefill_even_without_prefix_cache():
    rig = Rig(prefix_cache=False)
    rig.submit("a", range(40), n=4, max_tokens=3)
    rig.run()
    assert rig.runner.n_tokens == 40 + 3 * 1 + 4 * 2


def test_fork_is_not_counted_as_a_prefix_hit():
    rig = Rig()
    rig.submit("a", range(13), n=3)
    rig.run()
    assert rig.counter(metrics.PREFIX_QUERIED_TOKENS) == 13
    assert rig.counter(metrics.PREFIX_HIT_TOKENS) == 0
    assert rig.counter(metrics.PROMPT_TOKENS) == 13
    assert {e.cached_tokens for e in rig.events} == {0}


def test_prompt_logprobs_are_reported_by_the_first_sample():
    rig = Rig()
    r = rig.submit("a", range(6), n=2, prompt_logprobs=0)
    rig.run()
    told = {e.session_id for e in rig.events if e.prompt_logprobs is not None}
    assert told == {"a"}
    expect_all(rig, r)


@pytest.mark.parametrize("depth", [1, 2])
def test_first_sample_that_ends_at_once_does_not_take_the_others_along(depth: int):
    rig = Rig(depth=depth)
    r = rig.submit("a", range(13), n=3, max_tokens=1)
    rig.run()
    expect_all(rig, r)
    starts = [row[1] for p in rig.plans for row in shape(p) if row[0] != "a"]
    assert min(starts) == 12  # the prompt's full pages were found again


def test_first_sample_that_fails_leaves_the_others_to_compute_the_prompt():
    rig = Rig(max_step_tokens=8)
    r = rig.submit("a", range(13), n=3)
    rig.runner.failing.add("a")
    rig.run()
    assert rig.finish["a"] == "error"
    for k in (1, 2):
        assert rig.output[branch_id("a", k)] == alone(r, k, 128)[0]


def test_preempted_first_sample_leaves_the_others_as_plain_sessions():
    rig = Rig(n_pages=9, page_tokens=2, max_num_seqs=4, max_model_len=18)
    records = [
        rig.submit("old", [1, 2, 3], max_tokens=12),
        rig.submit("a", [4, 5, 6, 7, 8], n=3, max_tokens=8),
    ]
    rig.run()
    assert rig.counter(metrics.PREEMPTIONS) > 0
    for r in records:
        expect_all(rig, r, 18)


def test_sample_does_not_fork_from_a_prompt_that_is_being_computed_again():
    rig = Rig(max_step_tokens=4, prefix_cache=False)
    r = rig.submit("a", range(11), n=2)
    for _ in range(3):
        rig.step()
    roster = rig.scheduler._roster
    roster.preempt(roster.running[0])
    assert shape(rig.step()) == [("a", 0, 4)]
    assert shape(rig.step()) == [("a#1", 0, 4)]
    rig.run()
    expect_all(rig, r)


def test_samples_wait_for_free_places():
    rig = Rig(max_num_seqs=2)
    r = rig.submit("a", range(6), n=5, max_tokens=3)
    rig.run()
    assert max(len(p.rows) for p in rig.plans) == 2
    expect_all(rig, r)


def test_samples_not_started_count_as_waiting():
    rig = Rig()
    rig.submit("a", range(6), n=5)
    assert rig.gauge(metrics.SESSIONS_WAITING) == 5
    rig.step()
    assert rig.gauge(metrics.SESSIONS_WAITING) == 4
    rig.step()
    assert rig.gauge(metrics.SESSIONS_RUNNING) == 5


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_abort_by_request_id_ends_all_samples(steps: int, depth: int):
    rig = Rig(depth=depth)
    rig.submit("a", range(6), n=3, max_tokens=20)
    rig.submit("ab", range(6), max_tokens=20)
    for _ in range(steps):
        rig.plan()
        if len(rig.in_flight) == depth:
            rig.commit()
    rig.abort("a")
    assert rig.finish == {"a": "abort", "a#1": "abort", "a#2": "abort"}
    rig.run()
    assert rig.finish["ab"] == "length"
    assert rig.gauge(metrics.PAGES_USED) == 0


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_abort_by_sample_id_ends_that_sample_only(steps: int):
    rig = Rig()
    r = rig.submit("a", range(6), n=3)
    for _ in range(steps):
        rig.step()
    rig.abort("a#1")
    rig.run()
    assert rig.finish == {"a": "length", "a#1": "abort", "a#2": "length"}
    assert rig.output["a#2"] == alone(r, 2, 128)[0]
