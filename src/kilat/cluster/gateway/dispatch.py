"""Dispatcher: which worker has which session, and how sessions and pages get from one worker to another. Pure: it sends nothing itself.

    submit, cancel          what requests want
    expect, lost, retire    who is there
    on_message, tick        what workers say, and what they do not say in time

Each call returns the messages to send, in order. Tokens and failures go to the requests through the session table.

    a session:   PARKED -> (LENDING ->) GIVEN to a worker -> ended, or given to the next
    given away:  hand-over after the first token, planned move, death of the worker, refusal

Whenever a session changes hands its epoch grows, so that it has one worker at any time whatever the others still say. A session whose
worker died goes on elsewhere from the tokens that were let through. Every offer ends with a Release to its owner.
"""

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from kilat.base import metrics
from kilat.base.errors import CapacityError, KilatError
from kilat.base.ids import branch_id
from kilat.cluster.gateway.errors import from_peer
from kilat.cluster.gateway.handover import note_read, on_fetched, on_offered
from kilat.cluster.gateway.leaving import advance, leave
from kilat.cluster.gateway.placing import Chooser, DispatchConfig, Effects, Placing, no_worker
from kilat.cluster.gateway.sessions import Inbox, SessionTable, Slot
from kilat.cluster.gateway.trip import Stage, Trip
from kilat.cluster.gateway.workers import WorkerState
from kilat.policy.route.views import Route, WorkerView
from kilat.wire.kv import Endpoint
from kilat.wire.messages import (
    Abort,
    Export,
    Fatal,
    Fetched,
    FromWorker,
    Hello,
    Offered,
    PagesChanged,
    Peers,
    Refused,
    Resync,
    SessionEvent,
    Status,
    StepEvents,
)
from kilat.wire.session import SessionRecord


class Dispatcher:
    """Times are seconds of one clock. ``on_route`` hears of every choice of workers, ``on_begun`` of every first event of a session
    from a worker."""

    def __init__(self, chooser: Chooser, table: SessionTable, config: DispatchConfig) -> None:
        self._placing = Placing(chooser, table, config)
        self.workers = self._placing.workers
        self.moves = self._placing.moves
        self.counts = self._placing.counts
        self.on_begun: Callable[[Trip, SessionEvent], None] = lambda trip, event: None
        self._table = table
        self._peers: dict[str, list[Endpoint]] = {}
        table.watcher = self

    @property
    def on_route(self) -> Callable[[Trip, Route], None]:
        return self._placing.on_route

    @on_route.setter
    def on_route(self, hear: Callable[[Trip, Route], None]) -> None:
        self._placing.on_route = hear

    def __len__(self) -> int:
        return len(self._placing.trips)

    # -- what requests want ---------------------------------------------------------------------------------------------------------

    def submit(self, record: SessionRecord, inbox: Inbox, first_index: int, now_s: float) -> Effects:
        """Take in a request; sample ``k`` goes to ``inbox`` as ``first_index + k``. Raises CapacityError when no worker can take it."""
        p = self._placing
        p.now_s = now_s
        if not self.workers.ready:
            raise CapacityError("the model is not ready yet or is going away: try again soon", status=503)
        family: list[Trip] = []
        for k in range(record.params.n):
            branch = branch_id(record.session_id, k)
            slot = self._table.add(branch, inbox, first_index + k, record.epoch)
            own = replace(record, session_id=branch, branch=k) if k else record
            family.append(Trip(slot, own, family, held=k > 0))
            p.trips[branch] = family[-1]
        try:
            p.place(family[0])
        except KilatError:
            for trip in family:
                self._table.remove(trip.id)
                p.forget(trip)
            raise
        return p.flush()

    def cancel(self, branches: Iterable[str], now_s: float, *, abort_as: str | None = None) -> Effects:
        """Forget these samples and stop them where they run, all under the name ``abort_as`` (None: each by its own). Idempotent."""
        p = self._placing
        p.now_s = now_s
        aborts: dict[str, list[str]] = {}
        alone: list[Trip] = []
        for branch in branches:
            self._table.remove(branch)
            trip = p.trips.get(branch)
            if trip is None:
                continue
            if trip.at is not None and trip.stage is Stage.GIVEN:
                aborts.setdefault(trip.at, []).append(branch)
            else:
                alone += trip.party[1:]  # no worker knows them yet
            p.unpin(trip)
            p.forget(trip)
        for worker_id, ids in aborts.items():
            p.tell(worker_id, Abort(ids if abort_as is None else [abort_as]))
        for trip in alone:
            trip.held = False
            if not trip.over:
                p.place_or_park(trip, no_worker())
        p.try_suspect()
        return p.flush()

    # -- who is there ---------------------------------------------------------------------------------------------------------------

    def expect(self, worker: WorkerState) -> None:
        """A worker has been started, and will say hello."""
        self.workers.add(worker)

    def lost(self, worker_id: str, error: KilatError, now_s: float) -> Effects:
        """A worker is gone: its sessions go on elsewhere, or end with ``error``. Unknown ids are ignored."""
        p = self._placing
        p.now_s = now_s
        if self.workers.remove(worker_id) is None:
            return []
        p.leaving.pop(worker_id, None)
        p.chooser.index.forget(worker_id)
        for move in self.moves.lost(worker_id):
            p.release(move.owner, [move.move_id])
            note_read(p, move)
        for lend, (trip, lender) in list(p.lends.items()):
            if lender == worker_id:
                del p.lends[lend]
                p.send_off(trip, None)
        for trip in list(p.trips.values()):
            if trip.target == worker_id:
                trip.target, trip.fetch_end, trip.fetched = None, 0, []
            if trip.at == worker_id and not trip.over:
                p.bereaved(trip, error)
        self._tell_peers()
        advance(p)
        p.try_suspect()
        return p.flush()

    def retire(self, worker_id: str, now_s: float) -> Effects:
        """Give this worker nothing more and let its sessions move elsewhere; :meth:`is_idle` says when they have. Raises CapacityError when
        no other worker could take them."""
        p = self._placing
        p.now_s = now_s
        worker = self.workers.get(worker_id)
        if worker is None:
            return []
        if not any(w.takes_sessions for w in self.workers if w is not worker):
            raise CapacityError(
                f"no other worker could take the sessions of {worker.name}: start more workers", status=503
            )
        worker.retiring = True
        here = [t for t in p.trips.values() if t.at == worker_id]
        for trip in here:
            if trip.stage is Stage.LENDING:
                p.again(trip, no_worker())
        # Those that will be handed over leave by themselves. Where others go with a session, it goes at once, before they begin.
        going = [t for t in here if t.at == worker_id and t.target is None]
        streams = [t for t in going if t.slot.tokens and len(t.party) == 1]
        at_once = [t.id for t in going if t not in streams]
        if at_once:
            p.tell(worker_id, Export(at_once))
        leave(p, worker_id, streams)
        return p.flush()

    def is_idle(self, worker_id: str) -> bool:
        """Whether no session is or will be at this worker, and no page of it is needed by another."""
        return all(worker_id not in (t.at, t.target) for t in self._placing.trips.values()) and all(
            m.owner != worker_id for m in self.moves
        )

    def views(self) -> list[WorkerView]:
        """The workers that can be given sessions, with their load of this moment."""
        return self.workers.views(self._placing.loads)

    def n_sessions(self, worker_id: str) -> int:
        """Sessions that a worker has."""
        return sum(t.at == worker_id for t in self._placing.trips.values())

    # -- what workers say -----------------------------------------------------------------------------------------------------------

    def on_message(self, worker_id: str, message: FromWorker, now_s: float) -> Effects:
        """Take in what a worker said. What comes from a worker that is not expected is ignored."""
        p = self._placing
        p.now_s = now_s
        worker = self.workers.get(worker_id)
        if worker is None:
            return []
        worker.heard_at_s = now_s
        if isinstance(message, StepEvents):
            cut = self._table.deliver(message.events)
            if cut:
                p.tell(worker_id, Abort(cut))
                self._cut(cut)
        elif isinstance(message, Status):
            self._confirm_pages(worker)
            worker.on_status(message)
        elif isinstance(message, Offered):
            on_offered(p, worker_id, message)
        elif isinstance(message, Fetched):
            on_fetched(p, worker_id, message)
        elif isinstance(message, PagesChanged):
            if not p.chooser.index.apply(worker_id, message):
                p.tell(worker_id, Resync())
        elif isinstance(message, Refused):
            self._refused(worker_id, message)
        elif isinstance(message, Hello):
            self._hello(worker, message)
        elif isinstance(message, Fatal):
            worker.fatal = message.message
        advance(p)
        p.try_suspect()
        return p.flush()

    def tick(self, now_s: float) -> Effects:
        """Called every now and then: what has taken too long."""
        p = self._placing
        p.now_s = now_s
        for move in self.moves.overdue(now_s):
            self.counts[metrics.MOVES_FAILED] += 1
            p.release(move.owner, [move.move_id])
            note_read(p, move)
        for lend, (trip, _) in list(p.lends.items()):
            if now_s > trip.until_s:
                del p.lends[lend]
                p.send_off(trip, None)
        for trip in p.parked.copy():
            if now_s > trip.until_s:
                p.end(trip, no_worker())
            else:
                p.try_parked(trip)
        advance(p)
        p.try_suspect()
        return p.flush()

    def _hello(self, worker: WorkerState, hello: Hello) -> None:
        worker.hello = hello
        self._tell_peers()
        p = self._placing
        if hello.layout is not None:
            p.tell(worker.worker_id, Resync())
        for trip in p.parked.copy():
            p.try_parked(trip)

    def _confirm_pages(self, worker: WorkerState) -> None:
        """Ask for the whole list when a change is missing. The status of now may be ahead of the changes that it counts, because it comes
        over another connection; the one before is not."""
        before, p = worker.status, self._placing
        if before is None or worker.hello is None or worker.hello.layout is None:
            return
        if not p.chooser.index.confirm(worker.worker_id, before.pages_seq):
            p.tell(worker.worker_id, Resync())

    def _refused(self, worker_id: str, message: Refused) -> None:
        p = self._placing
        trip = p.trips.get(message.session_id)
        if trip is None or trip.at != worker_id or trip.stage is not Stage.GIVEN:
            return
        error = from_peer(message.code, message.message, status=message.status, param=message.param)
        if isinstance(error, CapacityError):
            error.retry_after_s = message.retry_after_s
        trip.refused_until_s[worker_id] = p.now_s + message.retry_after_s
        others = any(
            w.takes_sessions and p.now_s >= trip.refused_until_s.get(w.worker_id, p.now_s)
            for w in self.workers
        )
        # One that is under way was promised an answer: it waits until somebody can take it.
        if message.retryable and (others or trip.slot.tokens):
            p.again(trip, error)
        else:
            p.unpin(trip)
            p.end(trip, error)

    def _cut(self, branches: Iterable[str]) -> None:
        for branch in branches:
            trip = self._placing.trips.get(branch)
            if trip is not None:
                self._placing.unpin(trip)
                self._placing.forget(trip)

    def _tell_peers(self) -> None:
        """Everybody whose pages can be read knows all others."""
        endpoints = {w.worker_id: w.hello.endpoints for w in self.workers if w.hello and w.hello.endpoints}
        if endpoints != self._peers:
            self._peers = endpoints
            for worker_id in endpoints:
                self._placing.tell(worker_id, Peers(endpoints))

    # -- what the session table says ------------------------------------------------------------------------------------------------

    def begun(self, slot: Slot, event: SessionEvent) -> None:
        """The first event of a session from the worker that has it now."""
        trip = self._placing.trips[slot.branch]
        self._placing.loads.first_token(trip.id)
        self._placing.passed(trip)
        trip.held = False
        if trip.record.branch == 0 and (trip.target is None or event.finish is not None):
            for t in trip.family:
                t.held = False  # they start now
        self.on_begun(trip, event)

    def missed(self, slot: Slot) -> bool:
        """An event was lost between two processes: whoever had the session stops, and it goes on from the tokens that were let through."""
        p = self._placing
        trip = p.trips[slot.branch]
        assert trip.at is not None
        many = trip.record.params.n > 1
        p.tell(trip.at, Abort([f"{t.id}#0" if many and t.record.branch == 0 else t.id for t in trip.party]))
        p.again(trip, no_worker())
        return True

    def ended(self, slot: Slot, event: SessionEvent) -> bool:
        """The last event of a session. One that its worker gave up goes on elsewhere if it can."""
        p = self._placing
        trip = p.trips[slot.branch]
        if event.finish == "abort" and any(w.takes_sessions and w.worker_id != trip.at for w in self.workers):
            p.again(trip, no_worker())
            return False
        p.unpin(trip)
        p.forget(trip)
        return True
