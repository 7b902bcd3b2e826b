"""Whole runs: the real dispatcher, router, index, role scaler and schedulers under faults.

10,000 of them: ``make seeds``.
"""

import pytest

from kilat.sim.faults import Fault, Faults, Weather
from tests.sim.mover import virtual_time
from tests.sim.runs import broken, cluster, settle

pytestmark = pytest.mark.logic

N_SEEDS = 60


def test_whatever_goes_wrong_every_request_ends_once_with_its_tokens_and_nothing_stays_pinned():
    found = {seed: what for seed in range(N_SEEDS) if (what := broken(seed))}
    assert not found


def test_without_faults_every_request_that_is_not_cancelled_gets_all_its_tokens():
    n_whole = 0
    for seed in range(1000, 1030):
        c, at_s = cluster(seed, Faults())
        assert not settle(c, at_s)
        full = ("are waiting, limit", "not ready yet")  # a short queue refuses, which is no fault
        errors = [e.error for _, e in c.control.ends() if e.error is not None]
        assert not [e for e in errors if not any(text in e.message for text in full)]
        n_whole += sum(e.error is None for _, e in c.control.ends())
    assert n_whole > 100


def test_runs_cover_what_they_are_for():
    """Hand-overs, lent prefixes, failed moves, retries, restarts, changed shares: all happen in some of them."""
    seen: dict[str, float] = {}
    for seed in range(2000, 2060):
        c, at_s = cluster(seed)
        settle(c, at_s)
        for name, n in c.control.dispatcher.counts.items():
            seen[name] = seen.get(name, 0) + n
        seen["restarts"] = seen.get("restarts", 0) + c.n_restarts
        seen["shares"] = seen.get("shares", 0) + len(c.control.changes)
    for name in ("hand_overs", "planned_moves", "prefix_lends", "moves_failed", "session_retries"):
        assert seen[f"kilat_{name}_total"] > 0, name
    assert seen["restarts"] > 10 and seen["shares"] > 0


def test_a_seed_gives_the_same_run_again():
    def trace(seed: int) -> list[object]:
        c, at_s = cluster(seed)
        settle(c, at_s)
        return [c.control.ends(), c.n_restarts, {n: w.edges for n, w in c.workers.items()}]

    assert [repr(trace(seed)) for seed in range(5)] == [repr(trace(seed)) for seed in range(5)]


def edges_of(seed: int) -> dict[str, int]:
    """How many edges each worker of a calm run has while there is traffic."""
    c, at_s = cluster(seed, Faults())
    with virtual_time(c.agenda):
        c.agenda.run(at_s + 0.4)
    return {name: w.edges for name, w in c.workers.items()}


@pytest.mark.parametrize("first, freeze_s", list(enumerate([None, 0.2, 3.0])))
def test_a_worker_may_end_or_stand_still_at_any_of_its_edges(first, freeze_s):
    """A quarter of the edges for each kind of fault, others for each; all of them: ``make seeds``."""
    seed = 7
    c, _ = cluster(seed, Faults())
    assert any(p == 0 for p, _ in c.weights.values())  # prefill and decode are apart in this one
    found = {}
    for name, n in edges_of(seed).items():
        for edge in range(first, n, 4):
            what = broken(seed, Faults(Weather(), {f"{name}.0": Fault(edge, freeze_s)}))
            if what:
                found[name, edge] = what
    assert not found
