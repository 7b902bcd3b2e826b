"""The mover: what a worker does about pages and sessions that come and go, between the steps of its engine. It never waits."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kilat.base import metrics
from kilat.cluster.worker.arrivals import Arrivals, SubmitFn
from kilat.cluster.worker.engine import MovingEngine
from kilat.cluster.worker.offers import Offers
from kilat.cluster.worker.tiers import TIER, Tiers
from kilat.kv.board import Board
from kilat.kv.links import Links
from kilat.kv.moves import Moves, State
from kilat.kv.tier_store import TierStore
from kilat.kv.transport import Transport
from kilat.policy.cache.changes import PageChanges
from kilat.policy.sched.moves import Arrived
from kilat.wire.kv import Endpoint, KvLayout
from kilat.wire.messages import (
    Adopt,
    Announce,
    Export,
    Fetch,
    FromWorker,
    Lend,
    PagesChanged,
    Peers,
    Release,
    Resync,
    SessionEvent,
    Submit,
    ToWorker,
)
from kilat.wire.session import SessionRecord

KEEP_S = 2.0
"""For writing the pool to a tier at the end; the supervisor does not wait for long."""


@dataclass(frozen=True)
class Roads:
    """How pages get in and out: transports, best first, the board of open moves, the layout of the pages, and the store of those that
    left the pool. All closed by the mover."""

    transports: Sequence[Transport]
    board: Board
    layout: KvLayout
    store: TierStore | None = None


class Mover:
    """Belongs to the loop's thread. Without ``roads`` sessions still come and go, but their pages are computed again.

    ``submit`` gives a session to the engine, or refuses it and says False. ``offer_s``: how long others have to read what is offered.
    """

    def __init__(
        self,
        worker_id: str,
        engine: MovingEngine,
        page_tokens: int,
        roads: Roads | None,
        *,
        send: Callable[[FromWorker], None],
        send_events: Callable[[list[SessionEvent]], None],
        submit: SubmitFn,
        offer_s: float,
    ) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._roads = roads
        self._send = send
        self._submit = submit
        store = roads.store if roads else None
        self._tiers = Tiers(engine, store, roads.layout) if roads and store else None
        self._links = Links(roads.transports if roads else [], {TIER: store} if store else None)
        self._moves = Moves()
        board = roads.board if roads and roads.transports else None
        self._offers = Offers(worker_id, engine, page_tokens, board, self._moves, send, offer_s=offer_s)
        self._arrivals = Arrivals(
            engine, page_tokens, self._links, self._moves, send, self._start, send_events, self._tiers
        )
        self._changes: PageChanges | None = None
        self._seq = 0

    @property
    def endpoints(self) -> list[Endpoint]:
        """For Hello: how others read this worker's pages."""
        return self._links.endpoints()

    @property
    def layout(self) -> KvLayout | None:
        """For Hello: None when nobody can read this worker's pages."""
        return self._roads.layout if self._roads and self._roads.transports else None

    @property
    def pages_seq(self) -> int:
        """Number of the last PagesChanged, -1 before the first."""
        return self._seq - 1

    @property
    def is_reading(self) -> bool:
        """Whether the loop should look again soon."""
        return self._arrivals.is_reading

    @property
    def is_busy(self) -> bool:
        """Whether sessions are on their way here, or pages are pinned for others."""
        return bool(len(self._arrivals) or len(self._moves))

    def submit(self, message: Submit) -> None:
        """Give a session to the engine, after its prefix has been read if it comes with one."""
        record = message.record
        self._arrivals.forget(record.session_id)
        if message.prefix is not None:
            self._arrivals.adopt(
                record, message.prefix, time.monotonic(), hand_over=message.hand_over, seal=True
            )
        else:
            self._arrivals.begin(record, hand_over=message.hand_over)

    def _start(self, record: SessionRecord, arrived: Arrived | None, hand_over: bool) -> bool:
        taken = self._submit(record, arrived, hand_over)
        if taken and hand_over:
            self._offers.watch(record.session_id)
        return taken

    def handle(self, message: ToWorker) -> None:
        """Take in a message about pages; others are none of its business."""
        now_s = time.monotonic()
        if isinstance(message, Peers):
            others = {w: ends for w, ends in message.endpoints.items() if w != self._worker_id}
            self._links.set_peers(others)
        elif isinstance(message, Fetch):
            self._arrivals.fetch(message.session_id, message.offer, now_s)
        elif isinstance(message, Adopt):
            self._arrivals.adopt(message.record, message.offer, now_s)
        elif isinstance(message, Announce):
            for session_id in message.session_ids:
                self._offers.announce(session_id, now_s)
        elif isinstance(message, Export):
            self._export(message.session_ids, now_s)
        elif isinstance(message, Lend):
            self._offers.lend(message.move_id, message.names, now_s)
        elif isinstance(message, Release):
            self._offers.release(message.move_ids)
            self._arrivals.release(message.move_ids)
        elif isinstance(message, Resync):
            self._tell_all_pages()

    def abort(self, session_ids: Iterable[str]) -> list[SessionEvent]:
        """Stop sessions that are on their way here; returns their last events."""
        return self._arrivals.abort(session_ids)

    def abort_all(self) -> list[SessionEvent]:
        """Stop all sessions that are on their way here; returns their last events."""
        return self._arrivals.abort_all()

    def poll(self, patience_s: float = 0.0) -> None:
        """Take in reads that have ended and times that are over. Sessions start here, so call it before a step; ``patience_s`` is what
        may be waited for those that are almost here."""
        self._arrivals.poll()
        self._arrivals.await_sessions(patience_s)
        now_s = time.monotonic()
        self._arrivals.expire(now_s)
        self._offers.expire(now_s)

    def after_step(self) -> None:
        """Tell what the step has changed. Send the events of the step before, for offered sessions go on after them."""
        self._offers.after_step(time.monotonic())
        self.tell_pages()

    def tell_pages(self) -> None:
        """Tell which pages can be found now. Before the events of a step: who asks again because of what he heard finds its pages."""
        stored, dropped = self._changes.take() if self._changes else ([], [])
        if self._tiers is not None:
            stored, dropped = self._tiers.changed(stored, dropped)
        if self._changes is not None and (stored or dropped):
            self._tell_pages(PagesChanged(self._seq, stored, dropped))

    def counters(self) -> dict[str, float]:
        """Numbers of the tiers that only grow."""
        return self._tiers.store.counters() if self._tiers is not None else {}

    def gauges(self) -> dict[str, float]:
        """Pages of this moment that others may read, that are read into, and that nobody wants any more but a read may still write."""
        pages = self._moves.n_pages()
        return {
            metrics.PAGES_OFFERED: float(pages[State.OFFERED]),
            metrics.PAGES_MOVING: float(pages[State.MOVING]),
            metrics.PAGES_QUARANTINED: float(pages[State.QUARANTINED]),
        }

    def keep_pages(self) -> None:
        """At an orderly end: what the pool holds goes to the tiers that outlive this process. Nothing may run any more."""
        if self._tiers is not None:
            self._tiers.keep_pool(KEEP_S)

    def close(self) -> None:
        """End all reads; afterwards nothing touches the pool."""
        self._links.close()
        if self._roads is not None:
            self._roads.board.close()

    def _export(self, session_ids: Iterable[str], now_s: float) -> None:
        for session_id in session_ids:
            record = self._arrivals.forget(session_id)
            if record is not None:
                self._offers.offer_record(record, now_s)
            else:
                self._offers.export(session_id)
        self._offers.after_step(now_s)  # what has nothing in flight does not wait for another step

    def _tell_all_pages(self) -> None:
        if self._changes is None:
            self._changes = self._engine.watch_pages()
        self._changes.take()
        names = self._engine.page_names()
        if self._tiers is not None:
            names = list(dict.fromkeys([*names, *self._tiers.names()]))
        self._tell_pages(PagesChanged(self._seq, names, [], whole=True))

    def _tell_pages(self, message: PagesChanged) -> None:
        self._send(message)
        self._seq += 1
