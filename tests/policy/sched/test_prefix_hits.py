"""Which prompt tokens are found instead of computed."""

import pytest

from kilat.base import metrics
from tests.policy.sched.fakes import Rig, alone, shape

pytestmark = pytest.mark.logic
PROMPT = [*range(10, 23)]  # 13 tokens: three full pages of 4 and one token


def warm(**config: object) -> Rig:
    """A rig that has computed PROMPT once."""
    rig = Rig(**config)
    rig.submit("warm", PROMPT, max_tokens=1)
    rig.run()
    return rig


def first_rows(rig: Rig, session_id: str) -> tuple[int, int]:
    """(start, tokens) of the session's first row."""
    return next((r.start, r.n_tokens) for p in rig.plans for r in p.rows if r.session_id == session_id)


def test_second_session_computes_only_what_is_not_in_full_pages():
    rig = warm()
    r = rig.submit("a", PROMPT)
    rig.run()
    assert first_rows(rig, "a") == (12, 1)
    assert rig.output["a"] == alone(r, 0, 128)[0]


@pytest.mark.parametrize(("n_tokens", "n_hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_hit_leaves_the_last_token_and_is_whole_pages(n_tokens: int, n_hit: int):
    rig = warm()
    r = rig.submit("a", PROMPT[:n_tokens])
    rig.run()
    assert first_rows(rig, "a") == (n_hit, n_tokens - n_hit)
    assert rig.output["a"] == alone(r, 0, 128)[0]


def test_output_tokens_are_found_as_part_of_the_next_prompt():
    rig = Rig()
    r = rig.submit("a", PROMPT, max_tokens=8)  # 21 tokens, 20 of them computed
    rig.run()
    rig.submit("b", [*PROMPT, *rig.output["a"], 5, 6])
    rig.run()
    assert first_rows(rig, "b") == (20, 3)
    assert rig.output["a"] == alone(r, 0, 128)[0]


def test_pages_of_a_running_session_are_found_once_committed():
    rig = Rig(depth=2)
    rig.submit("a", PROMPT, max_tokens=20)
    rig.plan()  # in flight, nothing committed
    rig.submit("b", PROMPT, priority=1)  # does not wait for the pages of one of lower priority
    rig.plan()
    rig.commit()
    rig.submit("c", PROMPT)
    rig.plan()
    assert first_rows(rig, "b") == (0, 13)
    assert first_rows(rig, "c") == (12, 1)
    rig.run()


def test_hits_are_looked_up_when_a_session_starts_not_when_it_is_submitted():
    rig = Rig(max_num_seqs=1)
    rig.submit("a", PROMPT, max_tokens=2)
    rig.submit("b", PROMPT)
    rig.run()
    assert first_rows(rig, "b") == (12, 1)


def test_other_salt_finds_nothing():
    rig = warm()
    rig.submit("a", PROMPT, salt="tenant b")
    rig.run()
    assert first_rows(rig, "a") == (0, 13)


def test_prefix_cache_can_be_off():
    rig = warm(prefix_cache=False)
    rig.submit("a", PROMPT)
    rig.run()
    assert first_rows(rig, "a") == (0, 13)
    assert rig.counter(metrics.PREFIX_QUERIED_TOKENS) == 0
    assert rig.gauge(metrics.PAGES_CACHED) == 0


def test_cached_tokens_come_with_the_first_event_only():
    rig = warm()
    rig.submit("a", PROMPT)
    rig.run()
    assert [e.cached_tokens for e in rig.events if e.session_id == "a"] == [12, 0, 0, 0]


def test_queried_and_hit_tokens_are_counted():
    rig = warm()
    rig.submit("a", PROMPT)
    rig.submit("b", [*PROMPT[:8], 1, 2])
    rig.run()
    assert rig.counter(metrics.PREFIX_QUERIED_TOKENS) == 13 + 13 + 10
    assert rig.counter(metrics.PREFIX_HIT_TOKENS) == 12 + 8
    assert rig.runner.n_tokens == 13 + (1 + 3) + (2 + 3)


def test_two_sessions_that_compute_the_same_page_keep_their_own():
    rig = Rig(depth=2)
    a = rig.submit("a", PROMPT)
    rig.plan()
    b = rig.submit("b", PROMPT, priority=1)  # waits for nobody
    rig.plan()
    rows = {r.session_id: list(r.pages) for p in rig.plans for r in p.rows}
    assert not set(rows["a"]) & set(rows["b"])
    rig.run()
    assert rig.output["a"] == rig.output["b"] == alone(a, 0, 128)[0] == alone(b, 0, 128)[0]
    assert rig.gauge(metrics.PAGES_CACHED) == 4  # one set of pages is left: 16 tokens


def test_prompt_logprobs_compute_the_whole_prompt_and_come_once():
    rig = warm(max_step_tokens=5)
    rig.submit("a", PROMPT, prompt_logprobs=0, max_tokens=3)
    rig.run()
    rows = [
        (r.start, r.n_tokens, r.prompt_logprobs) for p in rig.plans for r in p.rows if r.session_id == "a"
    ]
    assert rows == [(0, 5, True), (5, 5, True), (10, 3, True), (13, 1, False), (14, 1, False)]
    first, *rest = [e.prompt_logprobs for e in rig.events if e.session_id == "a"]
    assert first[0] is None and [x.token_id for x in first[1:]] == PROMPT[1:]
    assert rest == [None, None]
    assert rig.counter(metrics.PREFIX_QUERIED_TOKENS) == 13  # only the one that warmed the cache


def test_prompt_logprobs_of_a_single_token_are_one_none():
    rig = Rig()
    rig.submit("a", [5], prompt_logprobs=3, max_tokens=1)
    rig.run()
    assert rig.events[0].prompt_logprobs == [None]
    assert not rig.plans[0].rows[0].prompt_logprobs


def test_pages_of_a_prompt_that_asked_for_logprobs_can_be_found_by_others():
    rig = Rig()
    rig.submit("a", PROMPT, prompt_logprobs=0)
    rig.run()
    rig.submit("b", PROMPT)
    rig.run()
    assert first_rows(rig, "b") == (12, 1)


@pytest.mark.parametrize(("prompt", "n_hit"), [(range(50, 58), 8), (range(30, 38), 4)])
def test_cached_pages_are_evicted_for_new_prompts_oldest_leaf_first(prompt: range, n_hit: int):
    rig = Rig(n_pages=8, max_model_len=32)
    for name, ids in (("old", range(30, 38)), ("new", range(50, 58)), ("big", range(60, 80))):
        rig.submit(name, ids, max_tokens=1)  # two pages, two pages, five pages: one has to go
        rig.run()
    rig.submit("again", [*prompt, 1], max_tokens=1)
    assert shape(rig.step()) == [("again", n_hit, 9 - n_hit)]
    assert rig.counter(metrics.PREEMPTIONS) == 0
