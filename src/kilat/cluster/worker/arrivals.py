"""Pages that come: reads for sessions that will go on here, and the sessions themselves once their pages are here.

A session starts with the pages that could be read from its beginning on; whatever is missing behind them is computed. Pages that this
worker holds already are not read.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kilat.base.ids import branch_id
from kilat.base.log import event, get_logger
from kilat.cluster.worker.engine import MovingEngine
from kilat.cluster.worker.tiers import TIER, Tiers
from kilat.kv.links import Ended, Links, Ticket
from kilat.kv.moves import Move, Moves, State
from kilat.policy.sched.moves import Arrived
from kilat.wire.kv import Offer
from kilat.wire.messages import Fetched, FromWorker, Recalled, SessionEvent
from kilat.wire.session import SessionRecord

HOLD_S = 120.0
"""Pages that were read for a session that neither comes nor is released are dropped after this."""

LOOK_S = 0.0002

MAX_RECALLS = 3
"""Reads of tiers that may fail for a session, each because of another page, before it is computed."""

_log = get_logger("worker")

SubmitFn = Callable[[SessionRecord, Arrived | None, bool], bool]


@dataclass(slots=True)
class _Part:
    """The pages of one offer, but for the first ``n_skipped``, which other parts have: ``n_lent`` that were here, then those that are
    read. ``ticket`` while they are."""

    offer: Offer
    pages: list[int]
    n_skipped: int
    n_lent: int
    ticket: Ticket | None = None
    ok: bool = True


@dataclass(slots=True)
class _Arrival:
    """A session on its way. Its pages may come before its ``record``; ``seal``: they are a prefix for the cache, not the session's own.
    ``after``: the read of a tier that brings them for another session and is waited for; ``n_failed``: reads of tiers that failed."""

    session_id: str
    until_s: float
    parts: list[_Part] = field(default_factory=list)
    record: SessionRecord | None = None
    hand_over: bool = False
    seal: bool = False
    after: str | None = None
    n_failed: int = 0
    aborts: list[str] = field(default_factory=list)
    was_awaited: bool = False

    @property
    def is_reading(self) -> bool:
        return any(part.ticket is not None for part in self.parts)


class Arrivals:
    """Belongs to the loop's thread. ``submit`` gives a session to the engine, or refuses it and says False."""

    def __init__(
        self,
        engine: MovingEngine,
        page_tokens: int,
        links: Links,
        moves: Moves,
        send: Callable[[FromWorker], None],
        submit: SubmitFn,
        send_events: Callable[[list[SessionEvent]], None],
        tiers: Tiers | None,
    ) -> None:
        self._engine = engine
        self._page_tokens = page_tokens
        self._links = links
        self._moves = moves
        self._send = send
        self._submit = submit
        self._send_events = send_events
        self._tiers = tiers
        self._coming: dict[str, _Arrival] = {}
        self._reads: dict[Ticket, tuple[_Arrival | None, _Part]] = {}

    def __len__(self) -> int:
        return len(self._coming)

    @property
    def is_reading(self) -> bool:
        """Whether :meth:`poll` may have news soon."""
        return bool(self._reads)

    def await_sessions(self, limit_s: float) -> None:
        """Wait a little for sessions of which only pages are missing, so that they start in the next step and not in the one after it; once
        for each of them."""
        until_s = time.monotonic() + limit_s
        late = [a for a in self._coming.values() if a.record is not None and not a.was_awaited]
        while any(a.is_reading for a in late) and time.monotonic() < until_s:
            time.sleep(LOOK_S)
            self.poll()
        for arrival in late:
            arrival.was_awaited = True

    def begin(self, record: SessionRecord, *, hand_over: bool, n_failed: int = 0) -> None:
        """Submit a session, after the start of its prompt has come back from a tier if that is worth it. ``n_failed``: tries so far."""
        recall = self._tiers.recall(record) if self._tiers is not None and n_failed < MAX_RECALLS else None
        if recall is None:
            self._submit(record, None, hand_over)
            return
        self.adopt(record, recall.offer, time.monotonic(), hand_over=hand_over, seal=True, after=recall.after)
        arrival = self._coming.get(record.session_id)
        if arrival is not None:
            arrival.n_failed = n_failed

    # -- what the gateway wants -----------------------------------------------------------------------------------------------------

    def fetch(self, session_id: str, offer: Offer, now_s: float) -> None:
        """Read pages of a session that will be adopted later."""
        self._take(self._arrival(session_id, now_s), offer, now_s)

    def adopt(
        self,
        record: SessionRecord,
        offer: Offer | None,
        now_s: float,
        *,
        hand_over: bool = False,
        seal: bool = False,
        after: str | None = None,
    ) -> None:
        """Read the last pages, then submit the session. ``seal``: the pages are a prefix of its prompt, to be put into the cache. ``after``:
        wait for this read of a tier, then ask again what there is."""
        arrival = self._arrival(record.session_id, now_s)
        arrival.record, arrival.hand_over, arrival.seal, arrival.after = record, hand_over, seal, after
        if offer is not None:
            self._take(arrival, offer, now_s)
        self._finish_if_here(arrival)

    def forget(self, session_id: str) -> SessionRecord | None:
        """Drop a session that is on its way, and its pages; returns its record when it was known."""
        arrival = self._coming.get(session_id)
        if arrival is None:
            return None
        self._drop(arrival)
        return arrival.record

    def release(self, move_ids: Iterable[str]) -> None:
        """Drop the pages of sessions that will not come: those that one of these moves was read for. Adopted ones stay."""
        gone = frozenset(move_ids)
        for arrival in list(self._coming.values()):
            if arrival.record is None and any(p.offer.move_id in gone for p in arrival.parts):
                self._drop(arrival)

    def abort(self, session_ids: Iterable[str]) -> list[SessionEvent]:
        """Stop sessions that are on their way; returns their last events. Ids as in ``wire.messages.Abort``."""
        events = []
        for given in session_ids:
            base, _, sample = given.partition("#")
            for arrival in list(self._coming.values()):
                whole = arrival.session_id.partition("#")[0] == base and not sample
                if whole or (arrival.session_id == given.removesuffix("#0") and self._is_alone(arrival)):
                    self._drop(arrival)
                    events += _last_events(arrival.record)
                elif arrival.session_id == base and sample:
                    arrival.aborts.append(given)
        return events

    def abort_all(self) -> list[SessionEvent]:
        """Stop everything that is on its way."""
        return self.abort(list(self._coming))

    @staticmethod
    def _is_alone(arrival: _Arrival) -> bool:
        return arrival.record is None or arrival.record.n_sessions == 1

    def expire(self, now_s: float) -> None:
        """Drop pages of sessions that were never adopted."""
        for arrival in list(self._coming.values()):
            if arrival.record is None and arrival.until_s <= now_s:
                event(_log, "arrival_overdue", session=arrival.session_id)
                self._drop(arrival)

    # -- reads ----------------------------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Take in the reads that have ended; sessions that have all their pages start."""
        for ended in self._links.poll():
            arrival, part = self._reads.pop(ended.ticket)
            self._moves.ended(part.offer.move_id, ok=ended.ok)
            part.ticket, part.ok = None, ended.ok
            if arrival is None:  # dropped; now nobody writes these pages any more
                self._engine.unpin(part.pages)
                if self._tiers is not None:
                    self._tiers.ended(part.offer)
                self._resume(part.offer.move_id)
                continue
            if not ended.ok:
                event(_log, "read_failed", session=arrival.session_id, move=part.offer.move_id, why=ended.why)
                self._engine.unpin(part.pages)
            self._tell(arrival, part.offer, ended)
            if part.offer.owner == TIER and not ended.ok:
                self._begin_anew(arrival, arrival.n_failed + 1)
            else:
                self._finish_if_here(arrival)
            self._resume(part.offer.move_id)

    def _resume(self, move_id: str) -> None:
        """A read is over: sessions that waited for it find its pages in the pool, or must go for them themselves."""
        for arrival in [a for a in self._coming.values() if a.after == move_id]:
            self._begin_anew(arrival, arrival.n_failed)

    def _begin_anew(self, arrival: _Arrival, n_failed: int) -> None:
        assert arrival.record is not None
        del self._coming[arrival.session_id]
        self.begin(arrival.record, hand_over=arrival.hand_over, n_failed=n_failed)
        again = self._coming.get(arrival.session_id)
        if again is not None:
            again.aborts += arrival.aborts
        elif arrival.aborts:
            self._send_events(self._engine.abort(arrival.aborts))

    def _arrival(self, session_id: str, now_s: float) -> _Arrival:
        arrival = self._coming.setdefault(session_id, _Arrival(session_id, 0.0))
        arrival.until_s = now_s + HOLD_S
        return arrival

    def _take(self, arrival: _Arrival, offer: Offer, now_s: float) -> None:
        """Start to read what is not here yet. A read that cannot be started is told as one that failed."""
        part, why = self._begin(arrival, offer, now_s)
        if part is not None:
            arrival.parts.append(part)
        if part is None or part.ticket is None:
            self._tell(arrival, offer, Ended(Ticket(0, 0), part is not None, 0, why))

    def _begin(self, arrival: _Arrival, offer: Offer, now_s: float) -> tuple[_Part | None, str]:
        n = len(offer.pages)
        self._trim(arrival)
        before = arrival.parts[-1].offer.n_tokens if arrival.parts else 0
        if not 0 <= offer.first_token <= before:
            return None, "the pages before these are not here"
        n_tokens = offer.n_tokens - offer.first_token
        if n != -(-n_tokens // self._page_tokens) or before % self._page_tokens or offer.n_tokens < before:
            return (
                None,
                f"{n} pages cannot hold tokens {offer.first_token:,} to {offer.n_tokens:,} after {before:,}",
            )
        if arrival.seal and len(offer.names) != n:
            return None, f"{n} pages of a prefix have {len(offer.names)} names"
        if self._moves.is_reading(offer.move_id):
            return None, "these pages are being read already"
        skip, rest = divmod(before - offer.first_token, self._page_tokens)
        if rest:
            return None, f"its pages begin at token {offer.first_token:,}, in the middle of a page"
        lent = self._engine.lend(offer.names[skip:n])
        n_here = skip + len(lent)
        if n_here == n:
            return _Part(offer, lent, skip, len(lent)), ""
        reserved = self._engine.reserve(n - n_here)
        ticket = None
        if reserved is not None:
            ticket = self._links.read(offer, range(n_here, n), reserved, offer.deadline_s)
        if reserved is None or ticket is None:
            self._engine.unpin([*lent, *(reserved or [])])
            return (
                None,
                "no pages are free" if reserved is None else f"there is no way to worker {offer.owner}",
            )
        part = _Part(offer, [*lent, *reserved], skip, len(lent), ticket)
        until_s = now_s + offer.deadline_s
        self._moves.begin(
            Move(
                offer.move_id,
                offer.owner,
                arrival.session_id,
                offer.epoch,
                reserved,
                until_s,
                State.MOVING,
            )
        )
        self._reads[ticket] = (arrival, part)
        return part, ""

    def _trim(self, arrival: _Arrival) -> None:
        """Drop what comes after a part that could not be read: an offer that begins before it may bring all of that."""
        n_good = next((i for i, part in enumerate(arrival.parts) if not part.ok), len(arrival.parts))
        for part in arrival.parts[n_good:]:
            if part.ticket is not None:
                self._tell(
                    arrival, part.offer, Ended(part.ticket, False, 0, "the pages before these are not here")
                )
            self._drop_part(part)
        del arrival.parts[n_good:]

    def _tell(self, arrival: _Arrival, offer: Offer, ended: Ended) -> None:
        if self._tiers is not None and offer.owner == TIER:
            pages = self._tiers.ended(offer)
            if ended.ok:
                self._send(Recalled(arrival.session_id, pages, ended.n_bytes))
            return
        self._send(Fetched(arrival.session_id, offer.move_id, ended.ok, ended.n_bytes, ended.why))

    # -- the end of an arrival --------------------------------------------------------------------------------------------------------

    def _drop(self, arrival: _Arrival) -> None:
        del self._coming[arrival.session_id]
        for part in arrival.parts:
            self._drop_part(part)

    def _drop_part(self, part: _Part) -> None:
        if part.ticket is not None:
            self._links.cancel(part.ticket)
            self._moves.drop(part.offer.move_id)
            self._reads[part.ticket] = (None, part)
        elif part.ok:
            self._engine.unpin(part.pages)

    def _finish_if_here(self, arrival: _Arrival) -> None:
        record = arrival.record
        if record is None or arrival.is_reading or arrival.after is not None:
            return
        del self._coming[arrival.session_id]
        good: list[_Part] = []
        for part in arrival.parts:
            if part.ok and len(good) == arrival.parts.index(part):
                good.append(part)
            elif part.ok:
                self._engine.unpin(part.pages)
        if arrival.seal:
            self._seal(good)
            self._submit(record, None, arrival.hand_over)
        else:
            pages = [page for part in good for page in part.pages]
            arrived = Arrived(pages, good[-1].offer.n_tokens) if good else None
            if not self._submit(record, arrived, arrival.hand_over):
                self._engine.unpin(pages)
        if arrival.aborts:
            self._send_events(self._engine.abort(arrival.aborts))

    def _seal(self, parts: list[_Part]) -> None:
        """Put the pages of a prefix into the index; those that were here are only kept until it is done."""
        for part in parts:
            names = part.offer.names[part.n_skipped + part.n_lent :]
            self._engine.seal_arrived(part.pages[part.n_lent :], names)
        for part in parts:
            self._engine.unpin(part.pages[: part.n_lent])


def _last_events(record: SessionRecord | None) -> list[SessionEvent]:
    """The last events of a session that never started here, one for each of its samples."""
    if record is None:
        return []
    return [
        SessionEvent(
            branch_id(record.session_id, k),
            record.epoch,
            len(record.output_ids) if k == 0 else 0,
            [],
            finish="abort",
        )
        for k in range(record.n_sessions)
    ]
