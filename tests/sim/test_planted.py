"""Faults in the code itself, planted one at a time: the checks of a run must see each of them, or a green run means nothing."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from kilat.cluster.gateway.sessions import Slot
from kilat.policy.cache.pins import Pins
from kilat.policy.route.index import PrefixIndex
from kilat.policy.sched.scheduler import Scheduler
from kilat.sim.mover import Mover
from kilat.sim.worker import SimWorker
from tests.sim.runs import broken

pytestmark = pytest.mark.logic

SEEDS = range(3000, 3150)


def release_nothing(monkeypatch):
    """Pages that were offered stay pinned for ever."""
    monkeypatch.setattr(Mover, "release", lambda self, move_ids: None)


def forget_reads(monkeypatch):
    """A read that nobody wants any more leaves its pages reserved."""
    monkeypatch.setattr(Mover, "_give_back", lambda self, read: self.reads.remove(read))


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
    """Pages are given back when they are offered, and read all the same."""
    offer = Mover._offer

    def offered(self, session_id, epoch, pages, n_from, n_tokens, record=None):
        self.host.scheduler.unpin(pages)
        offer(self, session_id, epoch, pages, n_from, n_tokens, record)
        self.host.scheduler.reserve(len(pages))  # somebody else has them now
        for page in pages:
            self.host.runner.pages[page] = [1] * self.host.page_tokens

    monkeypatch.setattr(Mover, "_offer", offered)
    monkeypatch.setattr(Pins, "unpin", lambda self, pages: None)


def read_other_pages(monkeypatch):
    """A read takes the pages from the start of the offer, whichever it was asked for, into the wrong order."""
    read = SimWorker.read

    def turned(self, r):
        r.take.reverse()
        read(self, r)

    monkeypatch.setattr(SimWorker, "read", turned)


@pytest.mark.parametrize(
    "plant",
    [
        release_nothing,
        forget_reads,
        never_raise_epochs,
        believe_through_gaps,
        forget_seeds,
        unpin_too_early,
        read_other_pages,
    ],
)
def test_a_planted_fault_is_seen(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch):
    plant(monkeypatch)
    for seed in SEEDS:
        try:
            what = broken(seed)
        except Exception as e:  # a check inside the objects themselves
            what = [repr(e)]
        if what:
            return
    raise AssertionError(f"{len(SEEDS)} runs did not see that: {plant.__doc__}")
