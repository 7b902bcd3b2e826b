"""A worker that is to end gives its sessions away: pages first, a few at a time, and whoever dies meanwhile costs no token."""

import pytest
from sim_cluster import SimCluster, happen, kinds

from kilat.base import metrics
from kilat.base.errors import CapacityError
from kilat.cluster.gateway.leaving import AHEAD_S, AT_ONCE
from kilat.wire.messages import Announce, Export, Fetch

pytestmark = pytest.mark.logic


def test_retired_worker_gives_its_sessions_away_and_gets_no_more() -> None:
    cluster = SimCluster([(1.0, 1.0)] * 2)
    asks = [cluster.ask(3, max_tokens=9) for _ in range(4)]
    for _ in range(2):
        cluster.settle()
        for w in cluster.workers.values():
            w.step()
    cluster.settle()
    assert cluster.workers["w0"].live
    cluster.retire("w0")
    cluster.settle()
    assert [w for w, _ in kinds(cluster, Export)] == ["w0"]
    assert cluster.gateway.is_idle("w0") and not cluster.workers["w0"].live
    cluster.ask(3)
    cluster.finish()
    cluster.check_over()
    assert not cluster.workers["w0"].live and all(a.inbox.error is None for a in asks)


def _streams(n: int) -> SimCluster:
    """``n`` sessions that run at w0, with a full page each, and w1 without any."""
    cluster = SimCluster([(1.0, 1.0)])
    for _ in range(n):
        cluster.ask(4, max_tokens=9)
    for _ in range(2):
        cluster.settle()
        cluster.workers["w0"].step()
    cluster.start()
    cluster.settle()
    assert len(cluster.workers["w0"].live) == n
    return cluster


def test_pages_of_a_stream_are_read_before_it_stops() -> None:
    cluster = _streams(2)
    old, new = cluster.workers.values()
    cluster.retire("w0")
    assert [sorted(m.session_ids) for _, m in kinds(cluster, Announce)] == [["s0", "s1"]]
    while old.inbound:
        old.take()
    old.step()
    while old.outbound:
        cluster.hear(old)
    assert [w for w, _ in kinds(cluster, Fetch)] == ["w1", "w1"]
    while new.inbound:
        new.take()
    cluster.hear(new)
    assert not kinds(cluster, Export)  # the other one's pages are still on their way
    cluster.settle()
    ((_, export),) = kinds(cluster, Export)
    assert sorted(export.session_ids) == ["s0", "s1"] and not old.live and len(new.live) == 2
    assert (
        cluster.gateway.counts[metrics.PLANNED_MOVES] == 2 and not cluster.gateway.counts[metrics.HAND_OVERS]
    )
    cluster.finish()
    cluster.check_over()


def test_streams_of_a_retired_worker_leave_a_few_at_a_time() -> None:
    cluster = _streams(AT_ONCE + 2)
    cluster.retire("w0")
    cluster.settle()
    told = [type(m) for _, m in cluster.sent if isinstance(m, Announce | Export)]
    assert told == [Announce, Export, Announce, Export]
    assert [len(m.session_ids) for _, m in kinds(cluster, Export)] == [AT_ONCE, 2]
    assert cluster.gateway.is_idle("w0")
    cluster.finish()
    cluster.check_over()


def test_stream_whose_pages_do_not_go_ahead_leaves_with_them() -> None:
    cluster = _streams(1)
    old, new = cluster.workers.values()
    cluster.retire("w0")
    while old.inbound:
        old.take()
    old.outbound.clear()
    cluster.tick(AHEAD_S / 2)
    assert not kinds(cluster, Export)
    cluster.tick(AHEAD_S)
    cluster.settle()
    assert not old.live and len(new.live) == 1
    cluster.finish()
    old.pins.clear()  # of the offer that nobody heard of
    cluster.check_over()


@pytest.mark.parametrize("victim", ["w0", "w1"])
def test_worker_that_dies_at_any_moment_of_a_planned_move_loses_nothing(victim: str) -> None:
    edges = 0
    while True:
        cluster = _streams(3)
        cluster.start()
        cluster.retire("w0")
        moment = happen(cluster, edges)
        if victim in cluster.workers:
            cluster.kill(victim)
        cluster.finish()
        cluster.check_over()
        assert all(ask.inbox.error is None for ask in cluster.asks)
        if not moment:
            break
        edges += 1
    assert edges > 15


def test_last_worker_cannot_be_retired() -> None:
    cluster = SimCluster([(1.0, 1.0)])
    with pytest.raises(CapacityError, match="no other worker"):
        cluster.retire("w0")
