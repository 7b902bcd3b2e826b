"""Placing: gives sessions to workers, takes them back, and says who must be told. The part of the dispatcher that the rest of it uses.

Time is ``now_s``, set by the dispatcher before each call. Messages collect in order until :meth:`Placing.flush`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kilat.base import metrics as names
from kilat.base.errors import CapacityError, EngineError, KilatError, PeerError
from kilat.base.hashing import root_hash
from kilat.cluster.gateway.moves import MoveTable
from kilat.cluster.gateway.sessions import SessionTable
from kilat.cluster.gateway.trip import Leaving, Stage, Trip
from kilat.cluster.gateway.workers import Workers
from kilat.policy.cache.table import extend_chain
from kilat.policy.route.costs import LinkRate
from kilat.policy.route.index import PrefixIndex
from kilat.policy.route.loads import Loads
from kilat.policy.route.views import Route, RouteRequest, WorkerView
from kilat.wire.kv import Offer
from kilat.wire.messages import Lend, Release, Submit, ToWorker

Effects = list[tuple[str, ToWorker]]

MAX_DEATHS = 2
"""Workers that die in a row with a session, before it is tried again with no other suspect beside it."""

COUNTS = (
    names.SESSION_RETRIES,
    names.SESSIONS_POISONED,
    names.HAND_OVERS,
    names.PLANNED_MOVES,
    names.LENDS,
    names.MOVES_DONE,
    names.MOVES_FAILED,
    names.MOVED_BYTES,
)


class Chooser(Protocol):
    """What is needed of ``policy.route.router.Router``."""

    index: PrefixIndex
    link: LinkRate

    def choose(self, request: RouteRequest, workers: Sequence[WorkerView], now_s: float) -> Route:
        """Raises CapacityError when no worker can take the request."""


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """``max_tries``: how often a session is given to another worker because of a failure. ``rescue_s``: how long a session that
    lost its worker may wait for another one. ``lend_s``: how long a session waits for a peer's offer of prefix pages."""

    max_tries: int = 8
    rescue_s: float = 0.0
    lend_s: float = 0.5


class Placing:
    """Owns trips and moves. ``lends``: sessions that wait for pages, and from whom. ``leaving``: those of workers that are to end. ``suspects`` wait to be tried alone, ``on_trial`` is
    the one that is. ``on_route`` hears of every choice."""

    def __init__(self, chooser: Chooser, table: SessionTable, config: DispatchConfig) -> None:
        self.workers = Workers()
        self.moves = MoveTable()
        self.loads = Loads()
        self.chooser = chooser
        self.table = table
        self.config = config
        self.trips: dict[str, Trip] = {}
        self.lends: dict[str, tuple[Trip, str]] = {}
        self.leaving: dict[str, Leaving] = {}
        self.parked: list[Trip] = []
        self.suspects: list[Trip] = []
        self.on_trial: Trip | None = None
        self.counts = dict.fromkeys(COUNTS, 0)
        self.on_route: Callable[[Trip, Route], None] = lambda trip, route: None
        self.now_s = 0.0
        self._out: Effects = []

    # -- messages -------------------------------------------------------------------------------------------------------------------

    def tell(self, worker_id: str, message: ToWorker) -> None:
        """To a worker, if it is there."""
        if self.workers.get(worker_id) is not None:
            self._out.append((worker_id, message))

    def release(self, worker_id: str, move_ids: Iterable[str]) -> None:
        ids = list(move_ids)
        if ids:
            self.tell(worker_id, Release(ids))

    def flush(self) -> Effects:
        """The messages since the last call."""
        out, self._out = self._out, []
        return out

    # -- to a worker ----------------------------------------------------------------------------------------------------------------

    def route(self, trip: Trip, *, without: Iterable[str] = ()) -> Route:
        """The router's choice for what is known of a session. Raises CapacityError."""
        hello = self.workers.hello
        page_tokens = hello.page_tokens if hello is not None else 1
        limit = trip.record.params.max_tokens
        request = RouteRequest(
            trip.id,
            trip.n_tokens,
            self._names(trip),
            page_tokens,
            trip.record.salt,
            None if limit is None else limit - len(trip.slot.tokens),
        )
        refused = (w for w, until_s in trip.refused_until_s.items() if self.now_s < until_s)
        views = self.workers.views(self.loads, without={*refused, *without})
        return self.chooser.choose(request, views, self.now_s)

    def place(self, trip: Trip) -> None:
        """Give a session, with all that go with it, to the worker that the router chooses. Raises CapacityError."""
        route = self.route(trip)
        worker, target, lender = route.worker, route.decode, route.lend_from
        if target is not None and not self.workers.can_move(worker, target):
            worker, target, lender = target, None, None
        if trip.ends_with_next:
            target = None  # nobody would go on
        trip.given(worker, target)
        tokens_left = route.why.get("tokens_left", trip.n_tokens)
        for t in trip.party:
            self.loads.sent(t.id, worker, target, tokens_left if t is trip else 0)
        self.on_route(trip, route)
        if lender is None or not self.workers.can_move(lender, worker):
            self.send_off(trip, None)
            return
        trip.stage = Stage.LENDING
        trip.lend = f"{trip.id}/{trip.slot.epoch}/lend"
        trip.until_s = self.now_s + self.config.lend_s
        self.lends[trip.lend] = (trip, lender)
        self.counts[names.LENDS] += 1
        self.tell(lender, Lend(trip.lend, list(self._names(trip)[: route.n_lent])))

    def send_off(self, trip: Trip, prefix: tuple[str, Offer] | None) -> None:
        """Submit a session to the worker that was chosen, with the pages that a peer (its id comes first) lends."""
        assert trip.at is not None
        trip.stage, trip.lend = Stage.GIVEN, None
        offer = None
        if prefix is not None:
            owner, offer = prefix
            self.moves.open(offer, owner, trip.at, trip.id, self.now_s)
        self.tell(trip.at, Submit(trip.portable, hand_over=trip.target is not None, prefix=offer))

    def _names(self, trip: Trip) -> list[bytes]:
        """Names of the full pages of all tokens but the last, if somebody could hold them."""
        hello = self.workers.hello
        if hello is None or hello.layout is None:
            return []
        n_pages = (trip.n_tokens - 1) // hello.page_tokens
        tokens = trip.record.prompt_ids + trip.slot.tokens
        extend_chain(
            trip.names, root_hash(hello.layout.model, trip.record.salt), tokens, hello.page_tokens, n_pages
        )
        return trip.names[:n_pages]

    # -- away from a worker ---------------------------------------------------------------------------------------------------------

    def leave(self, trip: Trip) -> None:
        """Whoever has a session has it no more, nor those that go with it."""
        for t in trip.party:
            self.unpin(t)
            t.slot.raise_epoch()
            t.stage, t.at, t.target, t.leaving = Stage.PARKED, None, None, False
            t.fetch_end, t.fetched = 0, []

    def again(self, trip: Trip, error: KilatError) -> None:
        """A session must go on elsewhere, because of ``error``, with which it ends when that cannot be."""
        self.leave(trip)
        trip.n_tries += 1
        self.counts[names.SESSION_RETRIES] += 1
        if trip.n_tries > self.config.max_tries:
            self.end(trip, error)
        else:
            self.place_or_park(trip, error)

    def place_or_park(self, trip: Trip, error: KilatError) -> None:
        """Give it to a worker, or let it wait for one for a while."""
        try:
            self.place(trip)
        except CapacityError:
            if self.config.rescue_s <= 0:
                self.end(trip, error)
            else:
                trip.until_s = self.now_s + self.config.rescue_s
                self.parked.append(trip)

    def try_parked(self, trip: Trip) -> None:
        """Give a session that waits for a worker to one, if there is one now."""
        try:
            self.place(trip)
        except CapacityError:
            return
        self.parked.remove(trip)

    def bereaved(self, trip: Trip, error: KilatError) -> None:
        """The worker of a session died. One that was tried alone is what killed it."""
        if trip.stage is Stage.LENDING:  # it was not there yet
            self.again(trip, error)
            return
        n = len(trip.slot.tokens)
        trip.n_deaths = trip.n_deaths + 1 if n == trip.mark else 1
        trip.mark = n
        if trip is self.on_trial:
            self.on_trial = None
            self.counts[names.SESSIONS_POISONED] += 1
            self.leave(trip)
            self.end(trip, poisoned(trip.n_deaths))
        elif trip.n_deaths >= MAX_DEATHS and self.config.rescue_s > 0:
            self.leave(trip)
            self.suspects.append(trip)
        else:
            self.again(trip, error)

    def try_suspect(self) -> None:
        """Give the next suspect to a worker when no other is on trial."""
        while self.on_trial is None and self.suspects and self.workers.ready:
            trip = self.suspects.pop(0)
            self.on_trial = trip
            try:
                self.place(trip)
            except CapacityError:
                self.on_trial = None
                self.suspects.insert(0, trip)
                return

    def passed(self, trip: Trip) -> None:
        """A session got on, or has ended: it kills nobody."""
        if trip is self.on_trial:
            self.on_trial = None

    def unpin(self, trip: Trip) -> None:
        """The pages of a session are not needed any more: its owner may have them back, its reader drops them."""
        for move in self.moves.take(trip.id):
            self.release(move.owner, [move.move_id])
            self.release(move.reader, [move.move_id])
        if trip.target is not None:
            self.release(trip.target, trip.fetched)
        if trip.lend is not None:
            self.lends.pop(trip.lend, None)  # what is offered later is released then
            trip.lend = None

    def end(self, trip: Trip, error: KilatError) -> None:
        """A session, and all that go with it, end with ``error``."""
        for t in trip.party:
            self.table.fail(t.id, error)
            self.table.remove(t.id)
            self.forget(t)

    def forget(self, trip: Trip) -> None:
        """A session is over, and was told so."""
        trip.over = True
        self.trips.pop(trip.id, None)
        self.loads.ended(trip.id)
        self.passed(trip)
        for waiting in (self.parked, self.suspects):
            if trip in waiting:
                waiting.remove(trip)


def no_worker() -> PeerError:
    """What a session is told that nobody can go on with."""
    return PeerError(
        "there is no worker that could go on with this answer; send the request again", code="worker_lost"
    )


def poisoned(n_deaths: int) -> EngineError:
    """What a session is told that takes its workers with it."""
    return EngineError(
        f"{n_deaths} workers died one after another while they computed this request, the last one with no other request "
        "under suspicion: it is not tried again",
        code="request_kills_workers",
    )
