"""Counters, gauges and the check of invariants."""

import pytest

from kilat.base import metrics
from kilat.base.errors import EngineError
from tests.policy.sched.fakes import Rig, next_token

pytestmark = pytest.mark.logic


def test_every_name_is_a_prometheus_name_and_used_once():
    names = [v for k, v in vars(metrics).items() if k.isupper() and isinstance(v, str)]
    assert len(set(names)) == len(names)
    rig = Rig()
    assert set(rig.scheduler.counters()) | set(rig.scheduler.gauges()) <= set(names)
    assert all(name.startswith("kilat_") and name.endswith("_total") for name in rig.scheduler.counters())
    assert not any(name.endswith("_total") for name in rig.scheduler.gauges())


def test_sessions_and_tokens_are_counted():
    rig = Rig()
    stop = next_token([1, 2, 3], 7)
    rig.submit("stops", [1, 2, 3], stop_token_ids=(stop,))
    rig.submit("long", [4, 5], max_tokens=6)
    rig.submit("fails", [6])
    rig.submit("aborted", [7, 8, 9])
    rig.submit("many", [1], n=2, max_tokens=2)
    rig.runner.failing.add("fails")
    rig.step()
    rig.abort("aborted")
    rig.run()
    assert rig.scheduler.counters() == {
        metrics.SESSIONS_SUBMITTED: 6,
        metrics.FINISHED_STOP: 1,
        metrics.FINISHED_LENGTH: 3,
        metrics.FINISHED_ERROR: 1,
        metrics.FINISHED_ABORT: 1,
        metrics.SESSIONS_DEPARTED: 0,
        metrics.ARRIVED_TOKENS: 0,
        metrics.PROMPT_TOKENS: 3 + 2 + 1 + 3 + 1,
        metrics.OUTPUT_TOKENS: 0 + 6 + 0 + 1 + 4,
        metrics.PREFILL_TOKENS: 3 + 2 + 3,  # a prompt of one token is a decode row
        metrics.PREFIX_QUERIED_TOKENS: 10,
        metrics.PREFIX_HIT_TOKENS: 0,
        metrics.PREEMPTIONS: 0,
        metrics.WASTED_TOKENS: 0,
    }


def test_prefill_tokens_are_counted_when_they_are_computed():
    rig = Rig(max_step_tokens=8)
    rig.submit("s", range(20), max_tokens=3)
    counted = []
    for _ in range(4):
        rig.step()
        counted.append(rig.counter(metrics.PREFILL_TOKENS))
    assert counted == [8, 16, 20, 20]
    assert rig.counter(metrics.PROMPT_TOKENS) == 20
    rig.run()
    rig.submit("again", range(20), max_tokens=3)
    rig.run()
    found = rig.counter(metrics.PREFIX_HIT_TOKENS)
    assert found > 0
    assert rig.counter(metrics.PREFILL_TOKENS) == 20 + 20 - found


def test_gauges_show_queue_and_pages():
    rig = Rig(n_pages=16, max_num_seqs=1)
    rig.submit("a", range(9), max_tokens=4)
    rig.submit("b", [1])
    rig.step()
    expected = {
        metrics.SESSIONS_RUNNING: 1,
        metrics.SESSIONS_WAITING: 1,
        metrics.PAGES_FREE: 13,
        metrics.PAGES_USED: 3,
        metrics.PAGES_CACHED: 0,
        metrics.PAGES_PINNED: 0,
    }
    assert rig.scheduler.gauges() == expected
    rig.run()
    after = {metrics.SESSIONS_RUNNING: 0, metrics.SESSIONS_WAITING: 0, metrics.PAGES_FREE: 12}
    after |= {
        metrics.PAGES_USED: 0,
        metrics.PAGES_CACHED: 4,
        metrics.PAGES_PINNED: 0,
    }  # 12 tokens of "a", 4 of "b"
    assert rig.scheduler.gauges() == after


@pytest.mark.parametrize(
    "what", ["n_flight", "n_planned", "n_computed", "state", "running", "queue", "page", "tokens"]
)
def test_check_notices_what_is_broken(what: str):
    rig = Rig()
    rig.submit("a", range(6), max_tokens=9)
    rig.step()
    rig.submit("b", [1])
    roster = rig.scheduler._roster
    [a] = roster.running
    rig.scheduler.check()
    if what == "n_flight":
        a.n_flight += 1
    elif what in ("n_planned", "n_computed"):
        setattr(a, what, getattr(a, what) + 1)
    elif what == "state":
        a.state = roster.live["b"].state
    elif what == "running":
        roster.running.append(a)
    elif what == "queue":
        roster.waiting.remove(roster.live["b"])
    elif what == "page":
        a.table.pages.pop()
    else:
        a.tokens += [1] * 20
    with pytest.raises(EngineError):
        rig.scheduler.check()
