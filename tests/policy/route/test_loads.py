"""Loads: what has been given out and not finished."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.policy.route.loads import Load, Loads

pytestmark = pytest.mark.logic


def test_a_prompt_counts_until_its_first_token_then_its_session_until_the_end():
    loads = Loads()
    loads.sent("s", "w", None, 100)
    assert loads.of("w") == Load(waiting=1, queued_prompt_tokens=100)
    loads.first_token("s")
    loads.first_token("s")
    assert loads.of("w") == Load(running=1)
    loads.ended("s")
    loads.ended("s")
    assert loads.of("w") == Load() and len(loads) == 0


def test_a_handed_over_session_takes_its_place_on_the_decode_worker_from_the_start():
    loads = Loads()
    loads.sent("s", "p", "d", 100)
    assert loads.of("p") == Load(waiting=1, queued_prompt_tokens=100)
    assert loads.of("d") == Load(running=1)
    loads.first_token("s")
    assert loads.of("p") == Load()
    assert loads.of("d") == Load(running=1)


def test_sending_again_replaces_what_was_counted():
    loads = Loads()
    loads.sent("s", "w1", None, 100)
    loads.sent("s", "w2", None, 70)
    assert loads.of("w1") == Load()
    assert loads.of("w2").queued_prompt_tokens == 70


def test_events_of_unknown_sessions_are_ignored():
    loads = Loads()
    loads.first_token("s")
    loads.ended("s")
    assert loads.of("w") == Load()


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["sent", "first_token", "ended"]),
        st.sampled_from("abc"),
        st.sampled_from("xyz"),
        st.sampled_from([None, "x", "y"]),
        st.integers(1, 50),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(CALLS)
def test_sums_are_those_of_the_live_sessions(calls):
    loads = Loads()
    live: dict[str, tuple[str, str, int]] = {}
    for name, session, worker, decode, n_tokens in calls:
        if name == "sent":
            loads.sent(session, worker, decode, n_tokens)
            live[session] = (worker, decode or worker, n_tokens)
        elif name == "first_token":
            loads.first_token(session)
            if session in live:
                live[session] = ("", live[session][1], 0)
        else:
            loads.ended(session)
            live.pop(session, None)
    for w in "xyz":
        waiting = [n for p, _, n in live.values() if p == w]
        running = [d for p, d, _ in live.values() if d == w and p != w]
        assert loads.of(w) == Load(len(waiting), len(running), sum(waiting))
    assert len(loads) == len(live)
