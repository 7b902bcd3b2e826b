"""The queue of waiting sessions, and the one order of all prefill work."""

from bisect import insort
from collections.abc import Container, Iterator

from kilat.policy.sched.fairness import Tenant
from kilat.policy.sched.session import Session


def turn(session: Session) -> tuple[int, bool, float, float, int]:
    """Sort key of prefill work, waiting or running: priority, then work that was admitted before (preempted sessions, further samples
    of a prompt), then the least served tenant, then arrival. The least key is next; it changes as tenants are served."""
    priority, arrival_s, number = session.rank
    return priority, not session.front, session.tenant.served, arrival_s, number


def _place(session: Session) -> tuple[bool, tuple[int, float, int]]:
    return not session.front, session.rank


class WaitingQueue:
    """Waiting sessions in lanes of one priority and one tenant. Inside a lane the order is fixed; only heads are compared anew."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, Tenant], list[Session]] = {}
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[Session]:
        for lane in self._lanes.values():
            yield from lane

    def push(self, session: Session) -> None:
        lane = self._lanes.setdefault((session.rank[0], session.tenant), [])
        insort(lane, session, key=_place)
        self._n += 1

    def remove(self, session: Session) -> None:
        """Take out a session, wherever it stands."""
        key = session.rank[0], session.tenant
        self._lanes[key].remove(session)
        if not self._lanes[key]:
            del self._lanes[key]
        self._n -= 1

    def head(self, aside: Container[Session] = ()) -> Session | None:
        """The session whose turn it is, those ``aside`` left out; it stays in the queue."""
        firsts = (next((s for s in lane if s not in aside), None) for lane in self._lanes.values())
        return min((s for s in firsts if s is not None), key=turn, default=None)
