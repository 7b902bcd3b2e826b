"""Recorded events must give the recorded plans, byte for byte: a change called a refactor changes no decision.

After a change that is meant to change decisions: ``python -m tests.policy.sched.record_trace``, and say in the commit what changed.
"""

import json

import pytest

from kilat.base import metrics
from tests.policy.sched.record_trace import CONFIGS, TRACE, Replayer, line, make

pytestmark = pytest.mark.logic


def recorded() -> list[str]:
    return TRACE.read_text().splitlines()


def test_recorded_events_give_the_recorded_plans():
    replayer = Replayer()
    for number, text in enumerate(recorded(), 1):
        event = json.loads(text)
        event.pop("out")
        assert line(event, replayer.play(event)) == text, f"line {number} of {TRACE.name}"


def test_trace_covers_what_a_scheduler_does():
    lines = [json.loads(text) for text in recorded()]
    totals = {name: sum(x["out"][name] for x in lines if x["do"] == "counters") for name in lines[-1]["out"]}
    for name in (
        metrics.PREEMPTIONS,
        metrics.WASTED_TOKENS,
        metrics.PREFIX_HIT_TOKENS,
        metrics.FINISHED_STOP,
    ):
        assert totals[name] > 0, name
    for name in (metrics.FINISHED_LENGTH, metrics.FINISHED_ABORT):
        assert totals[name] > 0, name
    plans = [x["out"] for x in lines if x["do"] == "plan" and x["out"]]
    assert any(p["copies"] for p in plans), "no fork"
    assert any(row[2] == [-1] for p in plans for row in p["rows"]), "no token in flight"
    assert any(row[5] for p in plans for row in p["rows"]), "no prompt logprobs"
    assert {x["out"] == "taken" for x in lines if x["do"] == "submit"} == {True, False}


def test_recording_is_reproducible():
    assert make(1, CONFIGS[1]) == make(1, CONFIGS[1])
