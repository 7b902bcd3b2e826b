"""Hand-over: what offers of pages and reports of reads mean for sessions on their way from one worker to another."""

from msgspec.structs import replace

from kilat.base import metrics
from kilat.base.errors import CapacityError
from kilat.base.ids import branch_id
from kilat.cluster.gateway.leaving import told
from kilat.cluster.gateway.moves import Move
from kilat.cluster.gateway.placing import Placing, no_worker
from kilat.cluster.gateway.trip import Stage, Trip
from kilat.wire.kv import Offer
from kilat.wire.messages import Adopt, Fetch, Fetched, Offered
from kilat.wire.session import SessionRecord


def on_offered(p: Placing, owner: str, message: Offered) -> None:
    """Pages may be read: of a prefix that was asked for, of a chunk of a prompt, or of a session that is to go on elsewhere."""
    offer, record = message.offer, message.record
    if message.session_id in p.lends:
        _lent(p, owner, message)
        return
    trip = p.trips.get(message.session_id)
    if trip is None or trip.at != owner or trip.stage is not Stage.GIVEN or offer.epoch != trip.slot.epoch:
        p.release(owner, [offer.move_id])
        if record is not None:
            _orphaned(p, owner, record)
    elif record is None:
        told(p, owner, trip)
        _chunk(p, trip, owner, offer)
    else:
        _last(p, trip, owner, offer, record)


def on_fetched(p: Placing, reader: str, message: Fetched) -> None:
    """A read is over, well or not: what could not be read is computed by the reader."""
    move = p.moves.fetched(reader, message.move_id)
    if move is None:
        return
    p.release(move.owner, [move.move_id])
    p.counts[metrics.MOVES_DONE if message.ok else metrics.MOVES_FAILED] += 1
    p.counts[metrics.MOVED_BYTES] += message.n_bytes
    layout = p.workers.hello.layout if p.workers.hello is not None else None
    if message.ok and layout is not None:  # pages that the reader had were not read
        p.chooser.link.measured(message.n_bytes // layout.page_bytes, p.now_s - move.began_s)
    note_read(p, move)


def note_read(p: Placing, move: Move) -> None:
    """A read is over. Until the session is adopted, the reader must be told if it never comes."""
    trip = p.trips.get(move.session_id)
    if trip is not None and trip.target == move.reader and trip.at == move.owner:
        trip.fetched.append(move.move_id)


def _lent(p: Placing, owner: str, message: Offered) -> None:
    trip, lender = p.lends[message.session_id]
    offer = message.offer
    if lender != owner:
        p.release(owner, [offer.move_id])
        return
    del p.lends[message.session_id]
    if offer.pages:
        p.send_off(trip, (owner, offer))
    else:
        p.release(owner, [offer.move_id])
        p.send_off(trip, None)


def _chunk(p: Placing, trip: Trip, owner: str, offer: Offer) -> None:
    """Pages of a prompt that is still being computed. Without a target that has all pages before them they are not worth moving."""
    target = trip.target
    fits = target is not None and p.workers.takes(target) and p.workers.can_move(owner, target)
    if target is None or not fits or not offer.pages or offer.first_token != trip.fetch_end:
        p.release(owner, [offer.move_id])
        return
    trip.fetch_end = offer.n_tokens
    p.moves.open(offer, owner, target, trip.id, p.now_s)
    p.tell(target, Fetch(trip.id, offer))


def _last(p: Placing, trip: Trip, owner: str, offer: Offer, record: SessionRecord) -> None:
    """The session has ended at ``owner`` and is adopted by another worker."""
    if trip.record.branch == 0:
        for t in trip.family[1:]:
            t.held = record.n_sessions > 1 and t.at == owner
    if (
        record.output_ids != trip.slot.tokens
    ):  # cannot be, for events come before offers; what was let through counts
        p.release(owner, [offer.move_id])
        p.again(trip, no_worker())
        return
    target = _next_worker(p, trip, owner)
    if target is None:
        p.release(owner, [offer.move_id])
        p.leave(trip)
        p.place_or_park(trip, no_worker())
        return
    is_hand_over = trip.target is not None and not trip.leaving
    p.counts[metrics.HAND_OVERS if is_hand_over else metrics.PLANNED_MOVES] += 1
    n_there = trip.fetch_end if target == trip.target else 0
    use = bool(offer.pages) and offer.first_token <= n_there and p.workers.can_move(owner, target)
    if target != trip.target:
        p.unpin(trip)
    for t in trip.party:
        t.slot.raise_epoch()
        p.loads.sent(t.id, target, None, 0 if use or t is not trip else trip.n_tokens)
        if t.slot.tokens:
            p.loads.first_token(t.id)
    trip.given(target, None)
    p.tell(target, Adopt(replace(record, epoch=trip.slot.epoch), offer if use else None))
    if use:
        p.moves.open(offer, owner, target, trip.id, p.now_s)
    else:
        p.release(owner, [offer.move_id])


def _next_worker(p: Placing, trip: Trip, owner: str) -> str | None:
    """The worker that was meant to go on, else the best other one, else ``owner`` itself."""
    if p.workers.takes(trip.target):
        return trip.target
    try:
        route = p.route(trip, without=[owner])
    except CapacityError:
        return owner if p.workers.takes(owner) else None
    return route.decode or route.worker


def _orphaned(p: Placing, owner: str, record: SessionRecord) -> None:
    """Sample 0 is wanted no more, but others went with it that nobody has started."""
    for k in range(1, record.n_sessions):
        trip = p.trips.get(branch_id(record.session_id, k))
        if trip is not None and trip.at == owner and trip.slot.epoch == record.epoch:
            trip.held = False
            p.again(trip, no_worker())
