"""Faults in the code itself, planted one at a time: the checks of a run must see each of them, or a green run means nothing."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from kilat.cluster.gateway.sessions import Slot
from kilat.cluster.worker.arrivals import Arrivals
from kilat.cluster.worker.offers import Offers
from kilat.policy.route.index import PrefixIndex
from kilat.policy.sched.scheduler import Scheduler
from tests.sim.mover import SimTransport
from tests.sim.runs import broken

pytestmark = pytest.mark.logic

SEEDS = range(3000, 3150)


def release_nothing(monkeypatch):
    """Pages that were offered stay pinned for ever."""
    monkeypatch.setattr(Offers, "_take_back", lambda self, move: None)


def forget_reads(monkeypatch):
    """A session that will not come after all leaves the pages reserved that were read for it."""
    monkeypatch.setattr(Arrivals, "_drop", lambda self, arrival: self._coming.pop(arrival.session_id))


def free_while_written(monkeypatch):
    """Pages of a read that nobody wants any more are given back while the transport may still write them."""
    drop = Arrivals._drop

    def dropped(self, arrival):
        for part in arrival.parts:
            if part.ticket is not None:
                self._engine.unpin(part.pages)
                part.pages = []
        drop(self, arrival)

    monkeypatch.setattr(Arrivals, "_drop", dropped)


def never_raise_epochs(monkeypatch):
    """A session that changes hands keeps its epoch."""

    def raise_epoch(self):
        self.next_seq = self.began = len(self.tokens)

    monkeypatch.setattr(Slot, "raise_epoch", raise_epoch)


def believe_through_gaps(monkeypatch):
    """The index takes a message after a gap for the next one."""
    monkeypatch.setattr(PrefixIndex, "_in_step", lambda self, worker_id, worker: True)


def forget_seeds(monkeypatch):
    """A session that moves goes on with another seed."""
    export = Scheduler.export

    def reseeded(self, session_id):
        record = export(self, session_id)
        return replace(record, params=replace(record.params, seed=record.params.seed + 1))

    monkeypatch.setattr(Scheduler, "export", reseeded)


def unpin_too_early(monkeypatch):
    """Pages go back to the pool while their offer is still open."""
    offer = Offers._offer

    def offered(self, move_id, epoch, pages, span, names):
        self._engine.unpin(pages)
        return offer(self, move_id, epoch, pages, span, names)

    monkeypatch.setattr(Offers, "_offer", offered)
    monkeypatch.setattr(Offers, "_take_back", lambda self, move: self._board.shut(move.move_id))


def read_other_pages(monkeypatch):
    """A read brings the right pages in the wrong order."""
    read = SimTransport.read

    def turned(self, offer, take, into, deadline_s):
        return read(self, offer, list(reversed(take)), into, deadline_s)

    monkeypatch.setattr(SimTransport, "read", turned)


@pytest.mark.parametrize(
    "plant",
    [
        release_nothing,
        forget_reads,
        free_while_written,
        never_raise_epochs,
        believe_through_gaps,
        forget_seeds,
        unpin_too_early,
        read_other_pages,
    ],
)
def test_a_planted_fault_is_seen(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch):
    plant(monkeypatch)
    assert any(map(is_broken, SEEDS)), f"{len(SEEDS)} runs did not see that: {plant.__doc__}"


def is_broken(seed: int) -> bool:
    try:
        return bool(broken(seed))
    except Exception:  # a check inside the objects themselves
        return True
