"""Sessions that arrive at a scheduler with pages, and what happens when there are too few pages for all."""

import pytest

from kilat.base import metrics
from kilat.base.errors import CapacityError, EngineError, RequestError
from kilat.base.hashing import root_hash
from kilat.policy.cache.table import extend_chain
from kilat.policy.sched.moves import Arrived
from tests.policy.sched.fakes import Rig, alone, record
from tests.policy.sched.moving import PROMPT, adopt, copy_pages, handed_over, rows_of

pytestmark = pytest.mark.logic


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("n_prompt", [1, 3, 4, 5, 8])
def test_adopted_session_computes_only_its_last_token(n_prompt: int, depth: int):
    old, new = Rig(depth=depth), Rig(depth=depth)
    r, gone = handed_over(old, prompt=PROMPT[:n_prompt], max_tokens=9)
    adopt(old, gone, new)
    new.run()
    assert old.output["a"] + new.output["a"] == alone(r, 0, 128)[0]
    assert rows_of(new, "a")[0] == (n_prompt, 1)
    assert new.counter(metrics.ARRIVED_TOKENS) == n_prompt
    assert new.counter(metrics.PREFIX_QUERIED_TOKENS) == 0
    assert new.events[0].seq == 1
    for rig in (old, new):
        assert rig.gauge(metrics.PAGES_USED) == 0


def test_what_did_not_arrive_is_computed():
    old, new = Rig(), Rig()
    r, gone = handed_over(old)
    arrived = Arrived(copy_pages(old, gone.pages[:2], new), 8)
    new.scheduler.submit(gone.record, 0.0, arrived)
    new.run()
    assert rows_of(new, "a")[0] == (8, 3)
    assert old.output["a"] + new.output["a"] == alone(r, 0, 128)[0]


def test_arrived_pages_can_be_found_at_once():
    old, new = Rig(), Rig(max_num_seqs=1)
    _, gone = handed_over(old)
    adopt(old, gone, new)
    assert len(new.scheduler.page_names()) == 2


def test_local_pages_of_the_start_may_arrive_together_with_read_ones():
    old, new = Rig(), Rig()
    new.submit("warm", PROMPT[:5])
    new.run()
    r, gone = handed_over(old)
    have = new.scheduler.lend(gone.record.page_hashes)
    assert len(have) == 1
    arrived = Arrived(have + copy_pages(old, gone.pages[1:], new), gone.n_tokens)
    new.scheduler.submit(gone.record, 0.0, arrived)
    new.run()
    assert rows_of(new, "a")[0] == (10, 1)
    assert old.output["a"] + new.output["a"] == alone(r, 0, 128)[0]
    assert new.gauge(metrics.PAGES_USED) == 0


@pytest.mark.parametrize("shared", [False, True])
def test_last_token_is_computed_even_if_its_kv_arrived(shared: bool):
    """... and not on a page that others can see."""
    rig = Rig()
    rig.submit("warm", PROMPT[:8], max_tokens=3)
    rig.run()
    chain: list[bytes] = []
    extend_chain(chain, root_hash("fake"), PROMPT, 4, 2)
    pages = rig.scheduler.lend(chain)
    if not shared:
        pages = copy_pages(rig, pages, rig)
        rig.scheduler.unpin(rig.scheduler.lend(chain) * 2)
    r = record("a", PROMPT[:8], max_tokens=6)
    rig.scheduler.submit(r, rig.now_s, Arrived(pages, 8))
    rig.run()
    assert rows_of(rig, "a")[0] == ((4, 4) if shared else (7, 1))
    assert rig.output["a"] == alone(r, 0, 128)[0]
    assert rig.gauge(metrics.PAGES_USED) == 0


def test_whole_prompt_is_computed_when_its_log_probabilities_are_wanted():
    rig = Rig()
    pages = rig.scheduler.reserve(2)
    r = record("a", PROMPT, prompt_logprobs=0)
    rig.scheduler.submit(r, 0.0, Arrived(pages, 8))
    assert rig.gauge(metrics.PAGES_USED) == 0
    rig.run()
    assert rows_of(rig, "a")[0] == (0, 10)
    assert len(rig.events[0].prompt_logprobs) == 10


def test_refused_session_leaves_its_pages_to_the_caller():
    rig = Rig()
    rig.submit("a", PROMPT)
    pages = rig.scheduler.reserve(3)
    for wrong in (Arrived(pages[:2], 9), Arrived([pages[0]] * 3, 9), Arrived(pages, -1), Arrived([60], 4)):
        with pytest.raises(EngineError):
            rig.scheduler.submit(record("b", PROMPT), 0.0, wrong)
    with pytest.raises(RequestError, match="live already"):
        rig.scheduler.submit(record("a", PROMPT), 0.0, Arrived(pages, 9))
    rig.scheduler.check()
    assert rig.gauge(metrics.PAGES_PINNED) == 3
    rig.scheduler.unpin(pages)
    rig.run()
    assert list(rig.finish) == ["a"] and rig.gauge(metrics.PAGES_USED) == 0


def test_session_under_way_is_taken_by_a_full_queue():
    rig = Rig(max_waiting=0, max_num_seqs=1)
    rig.submit("a", PROMPT)
    rig.step()
    with pytest.raises(CapacityError):
        rig.submit("b", PROMPT)
    rig.submit("c", PROMPT, epoch=1)
    rig.submit("d", PROMPT, output_ids=[1])
    rig.run()
    assert set(rig.finish) == {"a", "c", "d"}


def test_session_under_way_goes_before_new_ones_of_its_priority():
    rig = Rig(max_num_seqs=1)
    rig.submit("new", PROMPT, arrival_s=0.0)
    rig.submit("old", PROMPT, arrival_s=1.0, output_ids=[1])
    rig.step()
    assert [r.session_id for r in rig.plans[0].rows] == ["old"]


# -- out of pages ---------------------------------------------------------------------------------------------------------------------


def parked(rig: Rig, session_id: str, prompt: list[int], n_pages: int, **options) -> None:
    pages = rig.scheduler.reserve(n_pages)
    for i, page in enumerate(pages):
        rig.runner.kv[page] = prompt[4 * i : 4 * i + 4]
    rig.scheduler.submit(record(session_id, prompt, **options), rig.now_s, Arrived(pages, 4 * n_pages))
    rig.scheduler.check()


def test_sessions_that_wait_with_pages_do_not_block_each_other():
    rig = Rig(n_pages=6, prefix_cache=False)
    prompts = {name: [i] * 15 for i, name in enumerate("ab")}
    for name, prompt in prompts.items():
        parked(rig, name, prompt, 3, max_tokens=3)
    assert rig.gauge(metrics.PAGES_FREE) == 0
    rig.run()
    assert rows_of(rig, "a")[0] == (12, 3)
    assert rows_of(rig, "b")[0] == (0, 15)
    assert rig.counter(metrics.PREEMPTIONS) == 1
    for name, prompt in prompts.items():
        assert rig.output[name] == alone(record(name, prompt, max_tokens=3), 0, 128)[0]


def test_running_session_out_of_pages_takes_those_of_one_that_waits():
    rig = Rig(n_pages=6, max_num_seqs=1)
    r = rig.submit("a", [1, 2, 3], max_tokens=14)
    rig.step()
    parked(rig, "b", [7] * 15, 3)
    rig.run()
    assert rig.output["a"] == alone(r, 0, 128)[0]
    assert len(rows_of(rig, "a")) == 14, "the running one was computed again"
    assert set(rig.finish) == {"a", "b"}


def test_more_urgent_session_keeps_the_pages_it_waits_with():
    rig = Rig(n_pages=6, max_num_seqs=1)
    rig.submit("a", [1, 2, 3], max_tokens=14)
    rig.step()
    parked(rig, "b", [7] * 15, 3, priority=1)
    rig.run()
    assert rows_of(rig, "b")[0] == (12, 3)
    assert set(rig.finish) == {"a", "b"}


def test_reserving_leaves_what_running_sessions_need():
    rig = Rig(n_pages=8, max_step_tokens=4)
    rig.submit("a", [1] * 12)
    rig.step()  # one page of three is covered
    assert rig.scheduler.reserve(5) is None
    pages = rig.scheduler.reserve(4)
    assert len(pages) == 4
    rig.run()
    assert rig.counter(metrics.PREEMPTIONS) == 0
    rig.scheduler.unpin(pages)


def test_pages_of_moves_that_fill_the_pool_hold_up_sessions_until_they_come_back():
    rig = Rig(n_pages=4)
    pages = rig.scheduler.reserve(3)
    r = rig.submit("a", PROMPT)
    assert rig.step() is None
    assert rig.scheduler.has_work
    rig.scheduler.unpin(pages)
    rig.run()
    assert rig.output["a"] == alone(r, 0, 128)[0]


def test_page_that_a_plan_copies_from_gets_no_new_owner_before_that_plan_is_back():
    rig = Rig(depth=2)
    r = rig.submit("a", PROMPT, n=2, max_tokens=5)
    rig.plan()
    rig.commit()
    rig.scheduler.freeze("a")
    [(source, _)] = rig.plan().copies  # for the second sample
    gone = rig.scheduler.depart("a")
    assert source in gone.pages
    rig.scheduler.unpin(gone.pages)
    pages = rig.scheduler.reserve(58)
    assert source not in pages
    rig.commit()
    assert rig.gauge(metrics.PAGES_PINNED) == 58
    rig.scheduler.unpin(pages)
    rig.run()
    assert rig.output["a#1"] == alone(r, 1, 128)[0]
