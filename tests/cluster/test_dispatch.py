"""Sessions on their way through workers that die, refuse, leave and are late: each request ends once, each page is given back."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_cluster import SimCluster, SimWorker, happen, kinds

from kilat.base.errors import CapacityError, EngineError, PeerError
from kilat.policy.route.router import Router
from kilat.policy.route.views import Route, RouteRequest, WorkerView
from kilat.wire.messages import (
    Adopt,
    Fetch,
    Lend,
    Offered,
    PagesChanged,
    Peers,
    Release,
    Resync,
    Submit,
)

pytestmark = pytest.mark.logic

SPLIT = [(1.0, 0.0), (0.0, 1.0)]
BOTH = [(1.0, 1.0), (1.0, 1.0)]


def test_long_prompt_is_computed_by_one_worker_and_goes_on_at_the_other() -> None:
    cluster = SimCluster(SPLIT)
    ask = cluster.ask(9)
    cluster.finish()
    cluster.check_over()
    assert [w for w, m in kinds(cluster, Submit)] == ["w0"]
    assert [m.hand_over for _, m in kinds(cluster, Submit)] == [True]
    assert [w for w, _ in kinds(cluster, Fetch)] == ["w1", "w1"]
    ((at, adopt),) = kinds(cluster, Adopt)
    assert at == "w1" and adopt.record.epoch == 1 and adopt.record.output_ids == ask.got()[0][:1]
    assert adopt.offer.first_token == 0
    assert [w for w, _ in kinds(cluster, Release)] == ["w0"] * 3


def test_router_is_told_how_much_may_still_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = SimCluster([(1.0, 0.0), (0.0, 1.0)])
    asked: list[int | None] = []
    choose = Router.choose

    def record(self: Router, request: RouteRequest, workers: Sequence[WorkerView], now_s: float) -> Route:
        asked.append(request.n_answer)
        return choose(self, request, workers, now_s)

    monkeypatch.setattr(Router, "choose", record)
    cluster.ask(9, max_tokens=6)
    cluster.settle()
    assert asked == [6]


@pytest.mark.parametrize("n", [1, 3])
def test_request_for_one_token_ends_where_its_prompt_was_computed(n: int) -> None:
    cluster = SimCluster(SPLIT)
    ask = cluster.ask(9, n=n, max_tokens=1)
    cluster.finish()
    cluster.check_over()
    assert [(w, m.hand_over) for w, m in kinds(cluster, Submit)] == [("w0", False)]
    assert not kinds(cluster, Fetch) and not kinds(cluster, Adopt)
    assert ask.ended() == set(range(n))


def test_samples_go_with_their_prompt_in_one_record() -> None:
    cluster = SimCluster(SPLIT)
    cluster.ask(9, n=3)
    cluster.finish()
    cluster.check_over()
    ((_, adopt),) = kinds(cluster, Adopt)
    assert adopt.record.n_sessions == 3


def test_samples_go_on_when_the_first_is_stopped_on_its_way() -> None:
    cluster = SimCluster(SPLIT)
    ask = cluster.ask(9, n=3)
    prefill = cluster.workers["w0"]
    while not any(isinstance(m, Offered) and m.record is not None for m in prefill.outbound):
        while prefill.inbound:
            prefill.take()
        prefill.step()
    while not ask.got():
        cluster.hear(prefill)
    cluster.stop(ask, 0)
    cluster.finish()
    cluster.check_over()
    assert ask.ended() == {1, 2}


def test_stream_survives_the_death_of_its_worker() -> None:
    cluster = SimCluster(BOTH)
    ask = cluster.ask(3, max_tokens=6)
    cluster.settle()
    for _ in range(2):
        for w in cluster.workers.values():
            w.step()
        cluster.settle()
    (first,) = [w for w in cluster.workers.values() if w.live]
    cluster.kill(first.id)
    (at, again) = kinds(cluster, Submit)[-1]
    assert at != first.id and again.record.epoch == 1 and again.record.output_ids == ask.got()[0]
    cluster.finish()
    cluster.check_over()
    assert ask.inbox.error is None


def test_what_a_dead_worker_still_says_is_dropped() -> None:
    cluster = SimCluster(BOTH)
    ask = cluster.ask(3)
    cluster.settle()
    (first,) = [w for w in cluster.workers.values() if w.live]
    first.step()
    late = list(first.outbound)
    cluster.kill(first.id)
    for m in late:
        assert cluster.gateway.on_message(first.id, m, cluster.now_s) == []
    assert ask.got() == {}
    cluster.finish()
    cluster.check_over()


def test_lone_worker_that_dies_ends_its_requests_at_once() -> None:
    cluster = SimCluster([(1.0, 1.0)], rescue_s=0.0)
    ask = cluster.ask(3)
    cluster.settle()
    cluster.kill("w0")
    assert isinstance(ask.inbox.error, PeerError) and ask.inbox.error.code == "worker_lost"
    cluster.check_over()
    with pytest.raises(CapacityError):
        cluster.ask(3)


def test_request_waits_for_a_worker_that_comes_back_and_not_for_ever() -> None:
    cluster = SimCluster(BOTH)
    one = cluster.ask(3)
    cluster.settle()
    for worker_id in list(cluster.workers):
        cluster.kill(worker_id)
    assert one.inbox.error is None
    cluster.start()
    cluster.finish()
    cluster.check_over()
    two = cluster.ask(3)
    cluster.settle()
    for worker_id in list(cluster.workers):
        cluster.kill(worker_id)
    cluster.tick(29.0)
    assert two.inbox.error is None
    cluster.tick(2.0)
    assert two.inbox.error is not None and two.inbox.error.retryable
    cluster.check_over()


def test_request_that_kills_its_workers_fails_alone() -> None:
    cluster = SimCluster([(1.0, 1.0)] * 3)
    good = [cluster.ask(3, max_tokens=30) for _ in range(6)]
    bad = cluster.ask(3, poison=True)
    for _ in range(200):
        cluster.settle()
        cluster.tick(0.2)
        for w in list(cluster.workers.values()):
            if w.id in cluster.workers:
                w.step()
        while len(cluster.workers) < 3:
            cluster.start()
        if not len(cluster.gateway):
            break
    cluster.check_over()
    assert isinstance(bad.inbox.error, EngineError) and not bad.inbox.error.retryable
    assert all(ask.inbox.error is None for ask in good)
    assert len(cluster.dead) == 3


def lending() -> tuple[SimCluster, str, str]:
    """A cluster in which a worker has been asked to lend the pages of a request's prompt to the one that got it."""
    cluster = SimCluster(BOTH)
    first = cluster.ask(9)
    cluster.finish()
    (holder,) = [w.id for w in cluster.workers.values() if w.names]
    for _ in range(60):  # until the load of the holder outweighs its pages
        cluster.ask(9, like=first)
        if kinds(cluster, Lend):
            break
    ((lender, _),) = kinds(cluster, Lend)
    assert lender == holder
    return cluster, holder, "w1" if holder == "w0" else "w0"


def test_prefix_that_a_peer_holds_is_lent() -> None:
    cluster, holder, other = lending()
    assert other not in [w for w, _ in kinds(cluster, Submit)]
    cluster.settle()
    at, submit = kinds(cluster, Submit)[-1]
    assert at == other and submit.prefix.owner == holder and submit.prefix.n_tokens == 8
    cluster.finish()
    cluster.check_over()
    assert cluster.gateway.counts["kilat_moves_done_total"] == 1


def test_request_does_not_wait_for_a_lender_that_is_late_or_dead() -> None:
    for kill in (True, False):
        cluster, holder, other = lending()
        if kill:
            cluster.kill(holder)
        else:
            cluster.tick(1.0)
        submit = next(m for w, m in kinds(cluster, Submit)[::-1] if w == other)
        assert submit.prefix is None
        cluster.finish()
        cluster.check_over()


def test_request_whose_worker_dies_before_the_loan_goes_to_another() -> None:
    cluster, _, other = lending()
    cluster.kill(other)
    cluster.finish()
    cluster.check_over()
    assert all(ask.inbox.error is None for ask in cluster.asks)


def test_peers_are_told_whenever_somebody_comes_or_goes() -> None:
    cluster = SimCluster(BOTH)
    last = dict(kinds(cluster, Peers))
    assert {w: set(m.endpoints) for w, m in last.items()} == {"w0": {"w0", "w1"}, "w1": {"w0", "w1"}}
    cluster.kill("w0")
    assert set(dict(kinds(cluster, Peers))["w1"].endpoints) == {"w1"}


def test_gap_in_the_news_of_pages_is_asked_about() -> None:
    cluster = SimCluster(BOTH)
    worker = cluster.workers["w0"]
    worker.outbound.append(PagesChanged(worker.seq + 3, [b"x"], []))
    before = len(kinds(cluster, Resync))
    cluster.hear(worker)
    assert [w for w, _ in kinds(cluster, Resync)[before:]] == ["w0"]


@pytest.mark.parametrize("weights", [SPLIT, [(1.0, 0.0), (0.0, 1.0), (0.0, 1.0)]])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("n", [1, 3])
def test_worker_that_dies_at_any_moment_of_a_hand_over_loses_nothing(
    weights: list[tuple[float, float]], victim: int, n: int
) -> None:
    edges = 0
    while True:
        cluster = SimCluster(weights)
        ask = cluster.ask(9, n=n)
        moment = happen(cluster, edges)
        if f"w{victim}" in cluster.workers:
            cluster.kill(f"w{victim}")
        cluster.finish()
        cluster.check_over()
        assert ask.inbox.error is None
        if not moment:
            break
        edges += 1
    assert edges > 15


ACTIONS = (
    "take",
    "take",
    "take",
    "hear",
    "hear",
    "hear",
    "step",
    "step",
    "kill",
    "start",
    "cancel",
    "stop",
    "ask",
    "retire",
    "tick",
)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([SPLIT, BOTH, SPLIT * 2]), st.integers(0, 250))
def test_whatever_happens_each_request_ends_once_and_each_page_is_given_back(
    seed: int, weights: list[tuple[float, float]], n_actions: int
) -> None:
    cluster, random = SimCluster(weights), Random(seed)
    for _ in range(n_actions):
        _act(cluster, random.choice(ACTIONS), random.randrange(1000))
    cluster.start()
    cluster.finish()
    cluster.check_over()


def _act(cluster: SimCluster, action: str, x: int) -> None:
    everybody = list(cluster.workers.values())

    def pick(able: list[SimWorker]) -> SimWorker | None:
        return able[x % len(able)] if able else None

    if action == "take" and (w := pick([w for w in everybody if w.inbound])):
        w.take()
    elif action == "hear" and (w := pick([w for w in everybody if w.outbound])):
        cluster.hear(w)
    elif action == "step" and (w := pick([w for w in everybody if w.live])):
        w.step()
    elif action == "kill" and len(everybody) > 1 and x % 3 == 0 and (w := pick(everybody)):
        cluster.kill(w.id)
    elif action == "start" and len(everybody) < 5:
        cluster.start([(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)][x % 3])
    elif action == "cancel" and cluster.asks and x % 2:
        cluster.cancel(cluster.asks[x % len(cluster.asks)])
    elif action == "stop" and (able := [(a, k) for a in cluster.asks for k in a.got() if k not in a.ended()]):
        cluster.stop(*able[x % len(able)])
    elif action == "ask" and len(cluster.asks) < 8:
        try:
            cluster.ask(1 + x % 13, n=1 + (x % 5 == 0) * 2, max_tokens=1 + x % 4)
        except CapacityError:
            pass
    elif action == "retire" and x % 4 == 0 and (w := pick(everybody)):
        try:
            cluster.retire(w.id)
        except CapacityError:
            pass
    elif action == "tick":
        cluster.tick((0.1, 1.0, 11.0)[x % 3])
