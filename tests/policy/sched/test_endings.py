"""How sessions end, and what their events say."""

import pytest

from kilat.policy.sched.plan import StepResult
from tests.policy.sched.fakes import EOS, Rig, alone, next_token

pytestmark = pytest.mark.logic


def sampled(prompt: list[int], n: int, seed: int = 7) -> list[int]:
    """The first ``n`` tokens of the fake model."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


def prompt_with_eos_at(position: int) -> list[int]:
    """A prompt whose output has the end token there and not before."""
    return next(
        [i, 0]
        for i in range(10_000)
        if EOS not in sampled([i, 0], position) and sampled([i, 0], position + 1)[-1] == EOS
    )


def events_of(rig: Rig, session_id: str) -> list:
    return [e for e in rig.events if e.session_id == session_id]


def give(rig: Rig, *ids: list[int], **result: object):
    """Commit the oldest plan with these output ids instead of the fake model's."""
    plan, _ = rig.in_flight.pop(0)
    events = rig.scheduler.commit(plan, StepResult(list(ids), **result), rig.now_s)
    rig.take(events)
    return events


def test_end_token_stops_and_is_not_part_of_the_output():
    rig = Rig()
    prompt = prompt_with_eos_at(2)
    rig.submit("a", prompt, ignore_eos=False, max_tokens=9)
    rig.run()
    assert rig.output["a"] == sampled(prompt, 2)
    last = events_of(rig, "a")[-1]
    assert (last.finish, last.stop_id, last.token_ids) == ("stop", EOS, [])


def test_end_token_can_be_ignored():
    rig = Rig()
    prompt = prompt_with_eos_at(1)
    rig.submit("a", prompt, ignore_eos=True, max_tokens=4)
    rig.run()
    assert rig.output["a"] == sampled(prompt, 4) and rig.finish["a"] == "length"


def test_stop_ids_stop_even_when_the_end_token_is_ignored():
    rig = Rig()
    ids = sampled([5, 6], 4)
    rig.submit("a", [5, 6], stop_token_ids=(ids[2],), max_tokens=9)
    rig.run()
    assert rig.output["a"] == ids[: ids.index(ids[2])]
    assert events_of(rig, "a")[-1].stop_id == ids[2]


@pytest.mark.parametrize(("min_tokens", "n_output"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4)])
def test_nothing_stops_before_min_tokens(min_tokens: int, n_output: int):
    rig = Rig()
    rig.submit("a", [1, 2], stop_token_ids=(50,), ignore_eos=False, min_tokens=min_tokens, max_tokens=9)
    for token in (3, 50, EOS, 4, EOS):
        if rig.plan() is not None:
            give(rig, [token])
    assert len(rig.output["a"]) == n_output and rig.finish["a"] == "stop"


def test_max_tokens_ends_with_length_and_keeps_the_last_token():
    rig = Rig()
    rig.submit("a", [1, 2], max_tokens=3)
    rig.run()
    last = events_of(rig, "a")[-1]
    assert (last.finish, last.stop_id, len(last.token_ids)) == ("length", None, 1)
    assert rig.output["a"] == sampled([1, 2], 3)


def test_context_limit_ends_with_length():
    rig = Rig(max_model_len=8)
    rig.submit("a", [1, 2], max_tokens=None)
    rig.run()
    assert len(rig.output["a"]) == 6 and rig.finish["a"] == "length"


def test_several_tokens_of_one_row_are_taken_in_order_until_the_stop():
    rig = Rig()
    rig.submit("a", [1, 2], stop_token_ids=(50,), max_tokens=9)
    rig.plan()
    [event] = give(rig, [3, 4, 50, 5, 6])
    assert (event.token_ids, event.finish, event.stop_id) == ([3, 4], "stop", 50)


def test_several_tokens_of_one_row_are_cut_at_max_tokens():
    rig = Rig()
    rig.submit("a", [1, 2], stop_token_ids=(50,), max_tokens=3)
    rig.plan()
    [event] = give(rig, [3, 4, 5, 50, 6])
    assert (event.token_ids, event.finish) == ([3, 4, 5], "length")


def test_several_tokens_of_one_row_are_all_computed_in_the_next():
    rig = Rig()
    rig.submit("a", [1, 2], max_tokens=9)
    rig.plan()
    give(rig, [3, 4, 5])
    [row] = rig.plan().rows
    assert (row.start, row.token_ids, row.sample) == (2, [3, 4, 5], True)


@pytest.mark.parametrize("burst", [2, 3, 5])
def test_bursts_of_tokens_give_the_same_output(burst: int):
    rig = Rig(burst=lambda _: burst)
    r = rig.submit("a", range(9), max_tokens=17, n=2)
    rig.run()
    assert [rig.output["a"], rig.output["a#1"]] == [alone(r, k, 128)[0] for k in (0, 1)]


def test_row_stopped_by_its_grammar_ends_after_its_token():
    rig = Rig()
    rig.submit("a", [1, 2], max_tokens=9)
    rig.submit("b", [3], max_tokens=9)
    rig.plan()
    a, b = give(rig, [4], [5], stopped=frozenset([0]))
    assert (a.token_ids, a.finish, a.stop_id) == ([4], "stop", None)
    assert b.finish is None


def test_grammar_that_is_complete_with_the_last_token_ends_with_stop():
    rig = Rig()
    rig.submit("a", [1, 2], max_tokens=1)
    rig.plan()
    [event] = give(rig, [4], stopped=frozenset([0]))
    assert (event.token_ids, event.finish) == ([4], "stop")


def test_grammar_that_allows_no_token_at_all_ends_with_stop():
    rig = Rig()
    rig.submit("a", [1, 2], max_tokens=9)
    rig.plan()
    [event] = give(rig, [], stopped=frozenset([0]))
    assert (event.token_ids, event.finish) == ([], "stop")


def test_failed_row_ends_its_session_alone():
    rig = Rig()
    rig.submit("bad", [1, 2], max_tokens=9)
    good = rig.submit("good", [1, 3], max_tokens=5)
    rig.step()
    rig.runner.failing.add("bad")
    rig.run()
    last = events_of(rig, "bad")[-1]
    assert (last.finish, last.error, last.error_code) == ("error", "logits are not finite", "engine_failed")
    assert rig.output["good"] == alone(good, 0, 128)[0]


@pytest.mark.parametrize("nonsense", [[], None, [None], [2**31], [-1], ["x"], [[1]], [1, None], 3])
def test_result_that_makes_no_sense_ends_its_session_alone(nonsense: object):
    rig = Rig()
    rig.submit("bad", [1, 2])
    good = rig.submit("good", [1, 3])
    rig.plan()
    give(rig, nonsense, rig.in_flight[0][1].token_ids[1])
    assert rig.finish == {"bad": "error"}
    rig.run()
    assert rig.output == {"bad": [], "good": alone(good, 0, 128)[0]}
    assert rig.gauge("kilat_pages_used") == 0


def test_missing_logprobs_end_the_session_that_asked_for_them():
    rig = Rig()
    rig.submit("a", [1], logprobs=0)
    rig.submit("b", [2])
    rig.plan()
    a, b = give(rig, [3], [4])
    assert (a.finish, b.finish) == ("error", None)


def test_pages_of_a_failed_row_are_not_found_by_others():
    rig = Rig()
    rig.submit("bad", range(9))
    rig.runner.failing.add("bad")
    rig.run()
    rig.submit("a", range(9))
    assert rig.step().rows[0].start == 0


def test_logprobs_come_with_their_tokens_and_are_cut_with_them():
    rig = Rig(burst=lambda _: 3)
    rig.submit("a", [1, 2], logprobs=0, max_tokens=4)
    rig.submit("b", [1, 2], max_tokens=4)
    rig.run()
    for e in events_of(rig, "a"):
        assert [x.token_id for x in e.logprobs] == e.token_ids
    assert [len(e.token_ids) for e in events_of(rig, "a")] == [3, 1]
    assert {e.logprobs for e in events_of(rig, "b")} == {None}


def test_events_are_numbered_and_carry_the_epoch():
    rig = Rig()
    rig.submit("a", [1, 2], epoch=5)
    rig.run()
    assert [(e.seq, e.epoch) for e in rig.events] == [(0, 5), (1, 5), (2, 5), (3, 5)]


def test_prefill_chunk_without_a_token_makes_no_event():
    rig = Rig(max_step_tokens=4)
    rig.submit("a", range(9), max_tokens=1)
    rig.step()
    rig.step()
    assert rig.events == []


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_abort_ends_a_session_in_any_state(steps: int):
    rig = Rig(max_step_tokens=4)
    rig.submit("a", range(6), max_tokens=9)
    for _ in range(steps):
        rig.step()
    [event] = rig.abort("a")
    assert (event.finish, event.token_ids) == ("abort", [])
    assert not rig.scheduler.has_work
    assert rig.gauge("kilat_pages_used") == 0


def test_abort_is_idempotent_and_ignores_unknown_ids():
    rig = Rig()
    rig.submit("a", [1])
    assert len(rig.abort("a", "a", "x", "x#3", "")) == 1
    assert rig.abort("a") == []


def test_abort_between_plan_and_commit_drops_the_row():
    rig = Rig()
    rig.submit("a", [1])
    other = rig.submit("b", [2])
    rig.plan()
    rig.abort("a")
    assert [e.session_id for e in rig.commit()] == ["b"]
    rig.run()
    assert rig.output == {"a": [], "b": alone(other, 0, 128)[0]}
