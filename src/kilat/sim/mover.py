"""Mover: pages of one simulated worker on the move, as the messages of wire/kv.py describe it.

What it offers stays pinned until it is released or its time is over. What it reads goes into pages reserved for that; a read that nobody
wants any more keeps its pages until it has ended, because something may still write them. A read counts only when the offer is still
open after the last byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kilat.base.errors import KilatError, NotFoundError
from kilat.policy.sched.moves import Arrived, Departed
from kilat.policy.sched.scheduler import Scheduler
from kilat.wire.kv import Offer
from kilat.wire.messages import Abort, Adopt, Fetch, Fetched, FromWorker, Lend, Offered, Refused, Submit
from kilat.wire.session import SessionRecord

OFFER_S = 2.0
"""How long pages that nobody releases stay pinned."""


class Host(Protocol):
    """The worker around a mover."""

    worker_id: str
    scheduler: Scheduler
    page_tokens: int

    def now_s(self) -> float: ...

    def send(self, message: FromWorker) -> None: ...

    def read(self, read: "Read") -> None:
        """Copy pages from the owner of an offer; ``Mover.on_read`` hears of the end of it, not at once."""


@dataclass(slots=True, eq=False)
class Read:
    """``take``: indices of pages of ``offer`` that go into the local ``pages``. ``ok``: None while it runs."""

    session_id: str
    offer: Offer
    take: list[int]
    pages: list[int]
    until_s: float
    ok: bool | None = None
    dropped: bool = False


@dataclass(slots=True, eq=False)
class _Pending:
    """A session that waits for its pages. ``lent``: pages of its prefix that are here already, pinned."""

    record: SessionRecord
    hand_over: bool = False
    prefix: Offer | None = None
    lent: tuple[int, ...] = ()


@dataclass(slots=True)
class _Announced:
    """Full pages of a session to be handed over that have been offered already."""

    epoch: int
    n_pages: int = 0


class Mover:
    """All offers, reads and waiting sessions of one worker. Called by it only, between steps."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.offers: dict[str, tuple[list[int], float]] = {}
        self.reads: list[Read] = []
        self.pending: dict[str, _Pending] = {}
        self._announced: dict[str, _Announced] = {}
        self._n_moves = 0

    @property
    def is_idle(self) -> bool:
        return not (self.offers or self.reads or self.pending)

    # -- sessions come ------------------------------------------------------------------------------------------------------------

    def submit(self, m: Submit) -> None:
        """Run a session, after the pages of its prefix have been read."""
        session_id = m.record.session_id
        offer = m.prefix
        if session_id in self.pending:
            self._forget(session_id)
        if offer is None or not offer.pages:
            self._start(_Pending(m.record, m.hand_over), None)
            if offer is not None:
                self.host.send(Fetched(session_id, offer.move_id, False, why="nothing to read"))
            return
        lent = self.host.scheduler.lend(offer.names)
        self.pending[session_id] = _Pending(m.record, m.hand_over, offer, tuple(lent))
        self._read(session_id, offer, list(range(min(len(lent), len(offer.pages)), len(offer.pages))))
        self._try_start(session_id)

    def fetch(self, m: Fetch) -> None:
        self._read(m.session_id, m.offer, list(range(len(m.offer.pages))))

    def adopt(self, m: Adopt) -> None:
        session_id = m.record.session_id
        if session_id in self.pending:
            self._forget(session_id)
        self.pending[session_id] = _Pending(m.record)
        if m.offer is not None:
            self._read(session_id, m.offer, list(range(len(m.offer.pages))))
        self._try_start(session_id)

    def _read(self, session_id: str, offer: Offer, take: list[int]) -> None:
        if not take:
            self.host.send(Fetched(session_id, offer.move_id, True))
            return
        pages = self.host.scheduler.reserve(len(take))
        if pages is None:
            self.host.send(Fetched(session_id, offer.move_id, False, why="no pages are free"))
            return
        read = Read(session_id, offer, take, pages, self.host.now_s() + offer.deadline_s)
        self.reads.append(read)
        self.host.read(read)

    def on_read(self, read: Read, ok: bool, why: str) -> None:
        """A read has ended; nothing writes its pages any more."""
        read.ok = ok
        read.until_s = self.host.now_s() + OFFER_S
        self.host.send(Fetched(read.session_id, read.offer.move_id, ok, why=why))
        if read.dropped or not ok:
            self._give_back(read)
        self._try_start(read.session_id)

    def _give_back(self, read: Read) -> None:
        self.reads.remove(read)
        self.host.scheduler.unreserve(read.pages)

    def _try_start(self, session_id: str) -> None:
        pending = self.pending.get(session_id)
        mine = [r for r in self.reads if r.session_id == session_id and not r.dropped]
        if pending is None or any(r.ok is None for r in mine):
            return
        del self.pending[session_id]
        if pending.prefix is not None:
            for read in mine:
                self.reads.remove(read)
                names = [pending.prefix.names[i] for i in read.take]
                self.host.scheduler.seal_arrived(read.pages, names)
            self.host.scheduler.unpin(pending.lent)
            self._start(pending, None)
            return
        pages: list[int] = []
        n_tokens = 0
        for read in sorted(mine, key=lambda r: r.offer.first_token):
            if read.offer.first_token != n_tokens:
                self._give_back(read)
                continue
            self.reads.remove(read)
            pages += read.pages
            n_tokens = read.offer.n_tokens
        self._start(pending, Arrived(pages, n_tokens) if pages else None)

    def _start(self, pending: _Pending, arrived: Arrived | None) -> None:
        record = pending.record
        try:
            self.host.scheduler.submit(record, self.host.now_s(), arrived, hand_over=pending.hand_over)
        except KilatError as e:
            if arrived is not None:
                self.host.scheduler.unreserve(arrived.pages)
            self.host.send(Refused(record.session_id, e.message, e.code, e.status, e.retryable))
            return
        if pending.hand_over:
            self._announced[record.session_id] = _Announced(record.epoch)

    # -- sessions go ----------------------------------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Announce the pages that a step has filled, and send off the sessions that can go."""
        scheduler = self.host.scheduler
        for session_id in list(self._announced):
            try:
                n_tokens, pages = scheduler.computed(session_id)
            except NotFoundError:
                del self._announced[session_id]
                continue
            done, n_full = self._announced[session_id], n_tokens // self.host.page_tokens
            if n_full > done.n_pages:
                new = pages[done.n_pages : n_full]
                scheduler.pin(new)
                self._offer(session_id, done.epoch, new, done.n_pages, n_full * self.host.page_tokens)
                done.n_pages = n_full
        for session_id in scheduler.take_frozen():
            self._send_off(session_id, scheduler.depart(session_id))

    def _send_off(self, session_id: str, departed: Departed) -> None:
        done = self._announced.pop(session_id, None)
        n_from = min(done.n_pages, len(departed.pages)) if done is not None else 0
        self.host.scheduler.unpin(departed.pages[:n_from])
        record, pages = departed.record, departed.pages[n_from:]
        self._offer(session_id, record.epoch, pages, n_from, departed.n_tokens, record)

    def _offer(
        self,
        session_id: str,
        epoch: int,
        pages: list[int],
        n_from: int,
        n_tokens: int,
        record: SessionRecord | None = None,
    ) -> None:
        self._n_moves += 1
        move_id = f"{self.host.worker_id}/{self._n_moves}"
        if pages:
            self.offers[move_id] = (pages, self.host.now_s() + OFFER_S)
        first = n_from * self.host.page_tokens
        offer = Offer(move_id, self.host.worker_id, epoch, pages, first, n_tokens, OFFER_S)
        self.host.send(Offered(session_id, offer, record))

    def export(self, session_ids: Sequence[str]) -> None:
        for session_id in session_ids:
            pending = self.pending.get(session_id)
            if pending is not None:
                self._forget(session_id)
                self._offer(session_id, pending.record.epoch, [], 0, 0, pending.record)
                continue
            try:
                self.host.scheduler.freeze(session_id)
            except NotFoundError:
                continue

    def lend(self, m: Lend) -> None:
        pages = self.host.scheduler.lend(m.names)
        names = m.names[: len(pages)]
        if pages:
            self.offers[m.move_id] = (pages, self.host.now_s() + OFFER_S)
        n_tokens = len(pages) * self.host.page_tokens
        offer = Offer(m.move_id, self.host.worker_id, 0, pages, 0, n_tokens, OFFER_S, names)
        self.host.send(Offered(m.move_id, offer))

    # -- ends ---------------------------------------------------------------------------------------------------------------------------

    def release(self, move_ids: Sequence[str]) -> None:
        """Moves are over: unpin what was offered, drop what was read for nobody."""
        for move_id in move_ids:
            offered = self.offers.pop(move_id, None)
            if offered is not None:
                self.host.scheduler.unpin(offered[0])
            for read in [r for r in self.reads if r.offer.move_id == move_id]:
                if read.session_id not in self.pending:
                    self._drop(read)

    def abort(self, m: Abort) -> None:
        """Sessions that have not started yet end without news."""
        for session_id in m.session_ids:
            self._forget(session_id)

    def _forget(self, session_id: str) -> None:
        pending = self.pending.pop(session_id, None)
        if pending is not None and pending.lent:
            self.host.scheduler.unpin(pending.lent)
        for read in [r for r in self.reads if r.session_id == session_id]:
            self._drop(read)

    def _drop(self, read: Read) -> None:
        read.dropped = True
        if read.ok is not None:
            self._give_back(read)

    def tick(self) -> None:
        """Unpin offers and drop fetched pages whose time is over."""
        now_s = self.host.now_s()
        self.release([move_id for move_id, (_, until_s) in self.offers.items() if until_s <= now_s])
        for read in [r for r in self.reads if r.ok and r.until_s <= now_s]:
            if read.session_id not in self.pending:
                self._drop(read)
