"""The real mover of a worker in a simulated one: its clock is the agenda, its transport copies pages of the fake model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

from kilat.cluster.worker import arrivals, mover
from kilat.cluster.worker.mover import Mover, Roads
from kilat.kv.board import Board
from kilat.kv.transport import CANCELLED, DEADLINE, WITHDRAWN, Done
from kilat.sim.agenda import Agenda
from kilat.sim.worker import MODEL_ID, SimWorker
from kilat.wire.kv import Endpoint, KvLayout, Offer

OFFER_S = 2.0
GARBAGE = 5


class SimTransport:
    """Reads pages in virtual time. A read that fails or is cancelled has written rubbish into its pages up to its last moment."""

    kind = "sim"

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self._peers: set[str] = set()
        self._done: list[Done] = []
        self._cancelled: set[int] = set()
        self._n = 0

    def endpoint(self) -> Endpoint:
        return Endpoint(self.kind, self._worker.worker_id.encode())

    def connect(self, worker_id: str, endpoint: Endpoint) -> None:
        self._peers.add(worker_id)

    def forget(self, worker_id: str) -> None:
        self._peers.discard(worker_id)

    def read(self, offer: Offer, take: Sequence[int], into: Sequence[int], deadline_s: float) -> int:
        self._n += 1
        ticket, pages = self._n, [offer.pages[i] for i in take]
        seconds = len(pages) * self._worker.shape.page_move_s
        late = seconds > deadline_s
        until_s = self._worker.agenda.now_s + deadline_s
        self._worker.agenda.after(
            deadline_s if late else seconds, lambda: self._look(ticket, offer, pages, list(into), until_s)
        )
        return ticket

    def _look(self, ticket: int, offer: Offer, pages: list[int], into: list[int], until_s: float) -> None:
        """The bytes could be here now; over a socket a peer that stands still sends none."""
        agenda, owner = self._worker.agenda, self._worker.peer(offer.owner)
        late = agenda.now_s >= until_s
        if self._worker.shape.owner_sends and owner is not None and not late:
            wait_s = min(owner.frozen_until_s, until_s) - agenda.now_s
            if wait_s > 0:
                agenda.after(wait_s, lambda: self._look(ticket, offer, pages, into, until_s))
                return
        self._end(ticket, offer, pages, into, late)

    def _end(self, ticket: int, offer: Offer, pages: list[int], into: list[int], late: bool) -> None:
        """The bytes have moved while the worker did other things, or stood still."""
        owner = self._worker.peer(offer.owner) if offer.owner in self._peers else None
        if ticket in self._cancelled:
            why = CANCELLED
        elif late:
            why = DEADLINE
        elif owner is None:
            why = "the peer is gone"
        else:
            why = "" if owner.mover._roads.board.covers(offer.move_id, pages) else WITHDRAWN
        if self._worker.alive:
            reserved = set(self._worker.scheduler._roster.pins)
            assert reserved.issuperset(into), "a read writes pages that are not reserved any more"
        mine = self._worker.runner.pages
        if mine is not None:
            theirs = owner.runner.pages if owner is not None and not why else None
            for page, to in zip(pages, into):
                mine[to] = list(theirs[page]) if theirs is not None else [GARBAGE] * self._worker.page_tokens
        self._done.append(Done(ticket, not why, 0 if why else 4 * self._worker.page_tokens * len(pages), why))
        self._worker.wake()

    def poll(self) -> list[Done]:
        done, self._done = self._done, []
        return done

    def cancel(self, ticket: int) -> None:
        self._cancelled.add(ticket)

    def close(self) -> None:
        pass


def make_mover(worker: SimWorker) -> Mover:
    """The mover of one life of a worker."""
    layout = KvLayout(1, worker.page_tokens, 1, 1, "int32", 4 * worker.page_tokens, MODEL_ID)
    roads = Roads([SimTransport(worker)], Board(shared=False), layout)
    return Mover(
        worker.worker_id,
        worker.engine,
        worker.page_tokens,
        roads,
        send=worker.send,
        send_events=worker.send_events,
        submit=worker.take,
        offer_s=OFFER_S,
    )


@contextmanager
def virtual_time(agenda: Agenda) -> Iterator[None]:
    """Movers look at the agenda for the time, and fetched pages that nobody comes for are dropped after ``OFFER_S``."""
    clock = SimpleNamespace(monotonic=lambda: agenda.now_s)
    with patch.object(mover, "time", clock), patch.object(arrivals, "HOLD_S", OFFER_S):
        yield
