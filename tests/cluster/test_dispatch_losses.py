"""Sessions that workers refuse, events and changes that are lost between two processes."""

import pytest
from sim_cluster import SimCluster, kinds

from kilat.base.errors import CapacityError
from kilat.wire.messages import Abort, Resync, Status, Submit

pytestmark = pytest.mark.logic

BOTH = [(1.0, 1.0), (1.0, 1.0)]


def test_refused_session_is_taken_elsewhere_and_fails_when_all_refuse() -> None:
    cluster = SimCluster(BOTH)
    cluster.workers["w0"].capacity = 0
    asks = [cluster.ask(3) for _ in range(4)]
    cluster.finish()
    assert all(ask.inbox.error is None for ask in asks)
    cluster.workers["w1"].capacity = 0
    refused = cluster.ask(3)
    cluster.finish()
    cluster.check_over()
    assert isinstance(refused.inbox.error, CapacityError) and refused.inbox.error.status == 429


def test_worker_that_was_full_is_asked_again_after_a_while() -> None:
    cluster = SimCluster(BOTH)
    ask = cluster.ask(3, max_tokens=30)
    cluster.settle()
    (first,) = [w for w in cluster.workers.values() if w.live]
    (other,) = [w for w in cluster.workers.values() if w is not first]
    other.capacity = 0
    first.step()
    cluster.retire(first.id)  # it leaves, the other one refuses, nobody else is there
    cluster.settle()
    assert ask.inbox.error is None and not other.live
    other.capacity = 100
    cluster.kill(first.id)
    cluster.finish()
    cluster.check_over()
    assert ask.inbox.error is None and [w for w, _ in kinds(cluster, Submit)][-1] == other.id


def test_new_request_ends_at_once_when_all_refuse_and_one_under_way_waits() -> None:
    cluster = SimCluster([(1.0, 1.0)])
    old = cluster.ask(3, max_tokens=30)
    cluster.settle()
    cluster.workers["w0"].step()
    cluster.settle()
    cluster.kill("w0")
    cluster.start().capacity = 0
    cluster.settle()
    new = cluster.ask(3)
    cluster.settle()
    assert isinstance(new.inbox.error, CapacityError) and old.inbox.error is None
    cluster.workers["w1"].capacity = 100
    cluster.finish()
    cluster.check_over()
    assert old.inbox.error is None


def test_session_of_which_an_event_was_lost_goes_on_from_what_was_let_through() -> None:
    cluster = SimCluster([(1.0, 1.0)])
    ask = cluster.ask(3, n=2, max_tokens=6)
    cluster.settle()
    worker = cluster.workers["w0"]
    for _ in range(2):
        worker.step()
    cluster.settle()
    worker.step()
    worker.outbound.popleft()  # sample 0's
    worker.step()
    cluster.finish()
    cluster.check_over()
    assert ask.inbox.error is None and ask.ended() == {0, 1}
    assert kinds(cluster, Abort)[0] == ("w0", Abort(["s0#0"]))


def test_lost_change_of_pages_that_no_other_follows_is_asked_for_again() -> None:
    cluster = SimCluster(BOTH)
    ask = cluster.ask(9)
    cluster.settle()
    (worker,) = [w for w in cluster.workers.values() if w.live]
    worker.names.append(b"new")
    worker.seq += 1  # told, and lost
    n_before = len(kinds(cluster, Resync))
    for n_asked in (0, 1):  # the first could have overtaken the change
        worker.outbound.append(Status(1, True, False, {}, {}, worker.seq - 1))
        cluster.hear(worker)
        assert len(kinds(cluster, Resync)) == n_before + n_asked
    cluster.finish()
    assert b"new" in cluster.gateway._placing.chooser.index.names(worker.id)
    worker.outbound.append(Status(2, True, False, {}, {}, worker.seq - 1))
    cluster.settle()
    assert len(kinds(cluster, Resync)) == n_before + 1, "nothing is missing now"
    assert ask.inbox.error is None
