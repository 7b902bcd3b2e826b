"""Planned moves: the sessions of a worker that is to end go elsewhere, a few at a time, and each pauses for two steps at most.

    announced   their worker offers the full pages that they have, and the target reads these while they still run
    exported    they stop, and the target reads what is left: the page that was not full, and what they filled meanwhile

Only then the next few begin, for their pages would be in the way of those. Reading all pages after a session has stopped would stop it for as
long as that takes. Sessions without tokens have nobody who waits for the next one, so they are not in here.
"""

from collections import deque
from collections.abc import Iterable

from kilat.base.errors import CapacityError
from kilat.cluster.gateway.placing import Placing
from kilat.cluster.gateway.trip import Leaving, Trip
from kilat.wire.messages import Announce, Export

AT_ONCE = 4
AHEAD_S = 2.0
"""Pages that have not gone ahead by then go with their session."""


def leave(p: Placing, worker_id: str, trips: Iterable[Trip]) -> None:
    """These sessions, which run at this worker, are to go elsewhere."""
    p.leaving[worker_id] = Leaving(deque(trips))
    advance(p)


def told(p: Placing, worker_id: str, trip: Trip) -> None:
    """The worker has said which pages a session has."""
    leaving = p.leaving.get(worker_id)
    if leaving is not None:
        leaving.asked.discard(trip.id)


def advance(p: Placing) -> None:
    """Go on with what can go on. To be called after whatever may have changed something."""
    for worker_id, leaving in list(p.leaving.items()):
        while _go_on(p, worker_id, leaving):
            pass


def _go_on(p: Placing, worker_id: str, leaving: Leaving) -> bool:
    """One stage further; False when something is waited for, or nobody is left."""
    here = [t for t, epoch in leaving.moving.items() if not t.over and t.slot.epoch == epoch]
    if not leaving.exported:
        if p.now_s < leaving.until_s and any(_is_ahead(p, leaving, t) for t in here):
            return False
        leaving.exported = True
        if here:
            p.tell(worker_id, Export([t.id for t in here]))
        return True
    if here or any(_is_read(p, t) for t in leaving.moving):
        return False
    leaving.moving.clear()
    leaving.asked.clear()
    _begin(p, worker_id, leaving)
    if not leaving.moving:
        del p.leaving[worker_id]
    return bool(leaving.moving)


def _begin(p: Placing, worker_id: str, leaving: Leaving) -> None:
    """Choose where the next sessions go, and have their pages offered."""
    while leaving.waiting and len(leaving.moving) < AT_ONCE:
        trip = leaving.waiting.popleft()
        if trip.over or trip.at != worker_id:
            continue
        leaving.moving[trip] = trip.slot.epoch
        try:
            route = p.route(trip, without=[worker_id])
        except CapacityError:
            continue  # it is exported all the same
        target = route.decode or route.worker
        if p.workers.can_move(worker_id, target):
            trip.target, trip.leaving = target, True
            p.loads.sent(trip.id, worker_id, target, 0)
            leaving.asked.add(trip.id)
    if leaving.moving:
        leaving.exported = False
        leaving.until_s = p.now_s + AHEAD_S
        if leaving.asked:
            p.tell(worker_id, Announce(sorted(leaving.asked)))


def _is_ahead(p: Placing, leaving: Leaving, trip: Trip) -> bool:
    """Whether pages of a session that runs are still on their way."""
    return trip.target is not None and (trip.id in leaving.asked or _is_read(p, trip))


def _is_read(p: Placing, trip: Trip) -> bool:
    return any(m.session_id == trip.id for m in p.moves)
