"""Out of pages: evict, preempt the youngest of the lowest priority, resume, and avoid it where it can be foreseen."""

from itertools import pairwise

import pytest

from kilat.base import metrics
from kilat.base.errors import EngineError
from tests.policy.sched.fakes import Rig, alone, shape

pytestmark = pytest.mark.logic


def tight(**config: object) -> Rig:
    """A pool of 8 pages of 2 tokens."""
    return Rig(**{"n_pages": 8, "page_tokens": 2, "max_model_len": 16, "max_num_seqs": 4, **config})


def expect_outputs(rig: Rig, records: list, limit: int = 16) -> None:
    for r in records:
        assert rig.output[r.session_id] == alone(r, 0, limit)[0]


def preempted(rig: Rig) -> list[str]:
    """Ids in the order in which they were preempted: gone from a plan, admitted again later."""
    return [
        session_id
        for i, p in enumerate(rig.plans)
        for session_id in p.gone
        if any(a.session_id == session_id for q in rig.plans[i:] for a in q.admitted)
    ]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_sessions_give_the_same_tokens(depth: int, prefix_cache: bool):
    rig = tight(depth=depth, prefix_cache=prefix_cache)
    records = [rig.submit(f"s{i}", [i, i + 1, i + 2], max_tokens=9) for i in range(3)]
    rig.run()
    assert rig.counter(metrics.PREEMPTIONS) == len(preempted(rig)) > 0
    expect_outputs(rig, records)
    assert [rig.finish[r.session_id] for r in records] == ["length"] * 3


def test_youngest_is_preempted_first():
    rig = tight()
    records = [rig.submit(f"s{i}", [i, 9], max_tokens=10) for i in range(3)]
    rig.run()
    assert preempted(rig)[0] == "s2"
    assert "s0" not in preempted(rig)
    expect_outputs(rig, records)


def test_lowest_priority_is_preempted_before_younger_sessions():
    rig = tight()
    records = [
        rig.submit("low", [1, 9], max_tokens=10, priority=-1),
        rig.submit("normal", [2, 9], max_tokens=10),
        rig.submit("high", [3, 9], max_tokens=10, priority=5),
    ]
    rig.run()
    assert preempted(rig)[0] == "low"
    assert "high" not in preempted(rig)
    expect_outputs(rig, records)


def test_youngest_is_by_arrival_and_not_by_submission():
    rig = tight()
    rig.submit("late", [1, 9], max_tokens=10, arrival_s=9.0)
    rig.submit("early", [2, 9], max_tokens=10, arrival_s=1.0)
    rig.submit("middle", [3, 9], max_tokens=10, arrival_s=5.0)
    rig.run()
    assert preempted(rig)[0] == "late"
    assert "early" not in preempted(rig)


def test_cached_pages_are_evicted_before_anybody_is_preempted():
    rig = tight()
    rig.submit("before", range(8), max_tokens=1)
    rig.run()
    assert rig.gauge(metrics.PAGES_CACHED) == 4
    rig.submit("a", [1, 2], max_tokens=14)
    rig.run()
    assert rig.counter(metrics.PREEMPTIONS) == 0
    assert rig.finish["a"] == "length"


def test_preempted_session_resumes_as_a_short_prefill_from_its_cached_pages():
    """Six pages of 4. "big" needs its fourth page and takes that of "small", whose only sealed page is evicted for a free one."""
    rig = Rig(n_pages=6, page_tokens=4, max_model_len=24, max_num_seqs=2)
    big, small = rig.submit("big", range(10), max_tokens=8), rig.submit("small", range(20, 25), max_tokens=10)
    rig.run()
    assert preempted(rig) == ["small"]
    again = [r for p in rig.plans for r in p.rows if r.session_id == "small" and r.n_tokens > 1][1]
    assert again.start % 4 == 0 and again.n_tokens > 1 and again.sample
    assert [a.token_ids[: a.n_prompt] for p in rig.plans for a in p.admitted if a.session_id == "small"] == [
        small.prompt_ids,
        small.prompt_ids,
    ]
    expect_outputs(rig, [big, small], 24)


def test_resumed_session_is_admitted_with_its_output():
    rig = tight()
    for i in range(3):
        rig.submit(f"s{i}", [i, 9], max_tokens=10)
    rig.run()
    second = [a for p in rig.plans for a in p.admitted if a.session_id == "s2"][1]
    n = len(second.token_ids)
    assert n > second.n_prompt == 2
    assert second.token_ids == [2, 9, *rig.output["s2"][: n - 2]]


def test_preempted_session_goes_before_sessions_that_wait():
    rig = tight(max_num_seqs=3)
    for i in range(5):
        rig.submit(f"s{i}", [i, 9], max_tokens=10, tenant=f"t{i}")
    rig.run()
    first = preempted(rig)[0]
    order = [a.session_id for p in rig.plans for a in p.admitted]
    assert order[:3] == ["s0", "s1", "s2"]
    assert order[3] == first == "s2"


def test_wasted_tokens_are_those_computed_again():
    rig = tight(prefix_cache=False)
    records = [rig.submit(f"s{i}", [i, 9], max_tokens=10) for i in range(3)]
    rig.run()
    needed = sum(len(r.prompt_ids) + len(rig.output[r.session_id]) - 1 for r in records)
    assert rig.counter(metrics.WASTED_TOKENS) == rig.runner.n_tokens - needed > 0


def test_pages_found_again_after_a_preemption_are_not_wasted_and_no_prefix_hits():
    with_cache, without = tight(), tight(prefix_cache=False)
    for rig in (with_cache, without):
        for i in range(3):
            rig.submit(f"s{i}", [i, 9, 9], max_tokens=10)
        rig.run()
    assert with_cache.counter(metrics.WASTED_TOKENS) < without.counter(metrics.WASTED_TOKENS)
    assert with_cache.counter(metrics.PREFIX_HIT_TOKENS) == 0
    assert with_cache.counter(metrics.PREFIX_QUERIED_TOKENS) == 9
    assert {e.cached_tokens for e in with_cache.events} == {0}


def test_session_that_would_be_in_the_way_at_once_is_not_admitted():
    """Two sessions run and own 2 of 4 pages each soon; a third prompt would fit in the pages that are left, but not for a step."""
    rig = Rig(n_pages=4, page_tokens=4, max_model_len=16, max_num_seqs=3)
    rig.submit("a", [1, 2], max_tokens=6)
    rig.submit("b", [3, 4], max_tokens=6)
    rig.step()
    rig.submit("c", [5], max_tokens=2)
    assert "c" not in [row[0] for row in shape(rig.step())]
    rig.run()
    assert rig.counter(metrics.PREEMPTIONS) == 0


def test_prompts_admitted_together_fit_together():
    """Each chunk fits at first, the whole prompts do not: the second waits instead of being preempted half way."""
    rig = Rig(n_pages=8, page_tokens=4, max_model_len=32, max_step_tokens=8)
    rig.submit("a", range(20), max_tokens=2)
    rig.submit("b", range(40, 60), max_tokens=2)
    rig.run()
    assert rig.counter(metrics.PREEMPTIONS) == 0
    assert max(len(p.rows) for p in rig.plans) == 1


def test_nobody_is_admitted_by_a_plan_that_ran_out_of_pages():
    """ "b" has to go for "a", and its pages would be enough for "c"; but who comes while pages run out is the next to go."""
    rig = tight(page_tokens=1, n_pages=10, max_model_len=10)
    rig.submit("a", [1, 2], max_tokens=8)
    rig.submit("b", [3, 4, 5], max_tokens=7)
    while not preempted_by_now(rig):
        rig.step()
        rig.submit(f"c{len(rig.plans)}", [6, 7, 8], max_tokens=1, priority=1)
    assert rig.plans[-1].gone == ["b"] and rig.plans[-1].admitted == []
    assert [a.session_id for a in rig.step().admitted] == ["c1"]


def preempted_by_now(rig: Rig) -> bool:
    return rig.counter(metrics.PREEMPTIONS) > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_oldest_session_is_never_left_out(depth: int):
    """Whichever step it needs a page in, alone or together with others. At depth 2 it may wait for one commit, then somebody goes."""
    for n_prompt in ((2, 2, 2), (2, 3, 3), (3, 2, 2), (3, 2, 3)):
        rig = tight(depth=depth)
        for i, n in enumerate(n_prompt):
            rig.submit(f"s{i}", [i, 9, 9][:n], max_tokens=10)
        rig.run()
        assert rig.counter(metrics.PREEMPTIONS) > 0
        rows = [p.step for p in rig.plans if "s0" in [row[0] for row in shape(p)]]
        assert len(rows) == 10 and all(later - earlier <= depth for earlier, later in pairwise(rows))


def test_preempted_session_goes_before_earlier_arrivals_of_its_tenant():
    rig = tight(max_num_seqs=2)
    rig.submit("a", [1, 9], max_tokens=10, arrival_s=5.0)
    rig.submit("b", [2, 9], max_tokens=10, arrival_s=6.0)
    rig.step()
    rig.submit("c", [3, 9], max_tokens=3, arrival_s=1.0)
    rig.run()
    assert [a.session_id for p in rig.plans for a in p.admitted] == ["a", "b", "b", "c"]


def test_session_that_sampled_many_tokens_at_once_still_gets_pages():
    """Bursts make every session need several tokens computed at once, more than admission counted; one must give way."""
    rig = Rig(n_pages=6, page_tokens=2, max_model_len=12, max_num_seqs=3, burst=lambda _: 5)
    records = [rig.submit(f"s{i}", [i], max_tokens=11) for i in range(3)]
    rig.run()
    expect_outputs(rig, records, 12)


def test_prompt_logprobs_survive_a_preemption_before_the_first_token():
    rig = Rig(n_pages=7, page_tokens=2, max_model_len=14, max_num_seqs=2, max_step_tokens=2)
    rig.submit("a", [1], max_tokens=10)
    rig.step()
    rig.submit("b", [5, 6, 7, 8, 9, 10, 11, 12], prompt_logprobs=0, max_tokens=2)
    rig.run()
    [told] = [e.prompt_logprobs for e in rig.events if e.prompt_logprobs is not None]
    assert [x and x.token_id for x in told] == [None, 6, 7, 8, 9, 10, 11, 12]
    assert preempted(rig) == ["b"]


def test_session_with_a_row_in_flight_is_never_preempted():
    rig = tight()
    rig.submit("a", [1, 2])
    rig.plan()
    roster = rig.scheduler._roster
    with pytest.raises(EngineError, match="in flight"):
        roster.preempt(roster.running[0])
