"""Roster: which session is in which state. The only place where a state changes or pages are given back.

A finished session whose row is still in flight is a ghost: it keeps its pages until that row is back, because a page that an
outstanding plan may write must not get a new owner.
"""

from bisect import insort

from kilat.base import metrics
from kilat.base.errors import EngineError
from kilat.policy.cache.pins import Pins
from kilat.policy.cache.pool import PagePool
from kilat.policy.cache.table import PageTable
from kilat.policy.sched.config import SchedulerConfig
from kilat.policy.sched.fairness import Tenants
from kilat.policy.sched.session import Session, State
from kilat.policy.sched.waiting import WaitingQueue

COUNTERS = (
    metrics.SESSIONS_SUBMITTED,
    metrics.FINISHED_STOP,
    metrics.FINISHED_LENGTH,
    metrics.FINISHED_ABORT,
    metrics.FINISHED_ERROR,
    metrics.SESSIONS_DEPARTED,
    metrics.ARRIVED_TOKENS,
    metrics.PROMPT_TOKENS,
    metrics.OUTPUT_TOKENS,
    metrics.PREFILL_TOKENS,
    metrics.PREFIX_QUERIED_TOKENS,
    metrics.PREFIX_HIT_TOKENS,
    metrics.PREEMPTIONS,
    metrics.WASTED_TOKENS,
)
FINISHED = {
    "stop": metrics.FINISHED_STOP,
    "length": metrics.FINISHED_LENGTH,
    "abort": metrics.FINISHED_ABORT,
    "error": metrics.FINISHED_ERROR,
}


class Roster:
    """All sessions and the page pool. ``running`` is sorted by rank; ``gone`` collects the ids that left it since the last plan.

    ``parked`` are the waiting sessions that have pages, ``frozen`` the frozen ones that nobody has asked for yet.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = PagePool(config.n_pages, config.page_tokens)
        self.pins = Pins(self.pool)
        self.tenants = Tenants(config.tenant_weights)
        self.live: dict[str, Session] = {}
        self.waiting = WaitingQueue()
        self.running: list[Session] = []
        self.parked: list[Session] = []
        self.frozen: list[Session] = []
        self.ghosts: list[Session] = []
        self.gone: list[str] = []
        self.n_held = 0
        self.counts = dict.fromkeys(COUNTERS, 0)

    @property
    def n_queued(self) -> int:
        return len(self.waiting) + self.n_held

    def add(self, session: Session) -> None:
        """A new session, WAITING or HELD."""
        self.live[session.id] = session
        session.tenant.n_live += 1
        self.counts[metrics.SESSIONS_SUBMITTED] += 1
        if session.state is State.HELD:
            self.n_held += 1
        else:
            self.waiting.push(session)

    def park(self, session: Session, pages: list[int], n_tokens: int) -> None:
        """Give a WAITING session ``pages``, which the caller owned, with the KV of its first ``n_tokens`` tokens."""
        session.table = PageTable.over(self.pool, pages)
        session.n_computed = session.n_planned = n_tokens
        session.n_hit = 0
        self.parked.append(session)
        self.counts[metrics.ARRIVED_TOKENS] += n_tokens

    def let_go(self, parent: Session) -> None:
        """HELD -> WAITING for the other samples of ``parent``: its prompt is computed, or it will never be."""
        for sample in parent.held:
            sample.state = State.WAITING
            self.n_held -= 1
            self.waiting.push(sample)
        parent.held = []

    def start(self, session: Session, table: PageTable, n_computed: int) -> None:
        """WAITING -> RUNNING with a table that holds the first ``n_computed`` tokens."""
        self._leave_queue(session)
        session.state = State.RUNNING
        session.table = table
        session.n_computed = session.n_planned = n_computed
        session.front, session.parent = False, None
        self.counts[metrics.WASTED_TOKENS] += max(session.n_lost - n_computed, 0)
        session.n_lost = 0
        insort(self.running, session, key=_rank)

    def preempt(self, session: Session) -> None:
        """RUNNING -> WAITING, in front; a parked session only loses its pages. Sealed pages stay findable until others need them; the
        rest is computed again."""
        if session.n_flight or session.table is None:
            raise EngineError("a session was preempted while a row of it was in flight")
        if session.state is State.RUNNING:
            self.running.remove(session)
            self.gone.append(session.id)
            session.front = True
        else:
            self._leave_queue(session)
        session.table.release()
        session.table = None
        session.n_lost = session.n_computed
        session.n_computed = session.n_planned = 0
        if session.prompt_logprobs is not None:
            session.prompt_logprobs = [None]
        session.state = State.WAITING
        self.waiting.push(session)
        self.counts[metrics.PREEMPTIONS] += 1

    def n_promised(self) -> int:
        """Pages that the running sessions need for their known tokens, and one more for each: with less left, the next steps would
        have to preempt somebody at once."""
        return sum(map(self.n_promised_to, self.running))

    def n_promised_to(self, s: Session) -> int:
        """The share of one of them."""
        if s.table is None:
            return 0
        return max(-(-len(s.tokens) // self.config.page_tokens) - len(s.table.pages), 0) + 1

    def in_the_way(self) -> Session | None:
        """Who must give up its pages when nobody can go on: a parked session, or the youngest running one; None when pages of moves
        or of frozen sessions must come back first."""
        parked = self.last_parked(keep=None if self.running else self.waiting.head())
        return parked or (self.running[-1] if len(self.running) > 1 else None)

    def last_parked(self, keep: Session | None = None) -> Session | None:
        """The youngest parked session of the lowest priority, ``keep`` aside: the first whose pages others may have."""
        return max((s for s in self.parked if s is not keep), key=_rank, default=None)

    def freeze(self, session: Session) -> None:
        """WAITING or RUNNING -> FROZEN. The runner forgets it."""
        self._take_out(session)
        session.state = State.FROZEN
        self.frozen.append(session)

    def depart(self, session: Session, n_pages: int) -> list[int]:
        """Any state but HELD -> FINISHED, without a trace in the counts of ends; the samples it holds leave with it. Its first
        ``n_pages`` pages are returned and pinned."""
        self.counts[metrics.SESSIONS_DEPARTED] += 1 + len(session.held)
        for sample in list(session.held):
            self._end(sample)
        self._end(session)
        if session.table is None:
            return []
        pages = session.table.surrender(n_pages)
        session.table = None
        self.pins.receive(pages)
        return pages

    def finish(self, session: Session, reason: str) -> None:
        """Any state -> FINISHED. The samples it holds go on without it."""
        self._end(session)
        self.counts[FINISHED[reason]] += 1
        self.let_go(session)
        if session.n_flight:
            self.ghosts.append(session)
        else:
            self._release(session)

    def _end(self, session: Session) -> None:
        self._take_out(session)
        session.state, session.parent = State.FINISHED, None
        del self.live[session.id]
        session.tenant.n_live -= 1

    def _take_out(self, session: Session) -> None:
        """Off the list that goes with its state."""
        if session.state is State.RUNNING:
            self.running.remove(session)
            self.gone.append(session.id)
        elif session.state is State.WAITING:
            self._leave_queue(session)
        elif session.state is State.FROZEN:
            if session in self.frozen:
                self.frozen.remove(session)
        elif session.parent is not None:
            self.n_held -= 1
            session.parent.held.remove(session)

    def _leave_queue(self, session: Session) -> None:
        self.waiting.remove(session)
        if session.table is not None:
            self.parked.remove(session)

    def bury(self, ghost: Session) -> None:
        """The last row of a finished session is back: nothing can write its pages any more."""
        self.ghosts.remove(ghost)
        self._release(ghost)

    def _release(self, session: Session) -> None:
        if session.table is not None:
            session.table.release()
            session.table = None

    def check(self) -> None:
        """Raise EngineError if an invariant is broken."""
        tables = [s.table.pages for s in (*self.live.values(), *self.ghosts) if s.table is not None]
        self.pool.check([*tables, list(self.pins)])
        parked = {s for s in self.waiting if s.table is not None}
        _expect(parked == set(self.parked) and len(parked) == len(self.parked), "parked sessions miscounted")
        _expect(all(s.state is State.FROZEN for s in self.frozen), "a session is listed as frozen and is not")
        by_state = {state: [s for s in self.live.values() if s.state is state] for state in State}
        _expect(set(by_state[State.WAITING]) == set(self.waiting), "the queue is not the waiting sessions")
        _expect(len(by_state[State.WAITING]) == len(self.waiting), "the queue is miscounted")
        _expect(set(by_state[State.RUNNING]) == set(self.running), "the list of running sessions is wrong")
        _expect(len(by_state[State.RUNNING]) == len(self.running), "a session is listed as running twice")
        _expect(len(by_state[State.HELD]) == self.n_held, "held sessions are miscounted")
        _expect(not by_state[State.FINISHED], "a finished session is live")
        _expect(self.running == sorted(self.running, key=_rank), "running sessions are out of order")
        _expect(len(self.running) <= self.config.max_running, "too many sessions run")
        for s in self.live.values():
            _check_session(s, self.config.page_tokens)
        for s in self.ghosts:
            _expect(s.state is State.FINISHED and s.n_flight > 0, "a ghost has nothing in flight")


def _check_session(s: Session, page_tokens: int) -> None:
    _expect(
        0 <= s.n_computed <= s.n_planned <= len(s.tokens) + (s.n_flight > 0),
        f"{s.id}: positions out of order",
    )
    _expect((s.n_flight > 0) == (s.n_planned > s.n_computed), f"{s.id}: rows in flight miscounted")
    _expect(s.n_prompt <= len(s.tokens) < s.n_end, f"{s.id}: should have ended")
    if s.table is not None:
        _expect(s.state is not State.HELD, f"{s.id}: held with pages")
        _expect(s.n_planned <= len(s.table.pages) * page_tokens, f"{s.id}: too few pages")
        _expect(s.table.n_sealed * page_tokens <= s.n_computed, f"{s.id}: sealed before computed")
    else:
        _expect(s.state is not State.RUNNING, f"{s.id}: running without pages")
        _expect(s.n_computed == 0, f"{s.id}: has computed tokens without pages")
    if s.state is not State.RUNNING and s.state is not State.FROZEN:
        _expect(s.n_flight == 0, f"{s.id}: has rows in flight without running")
    for sample in s.held:
        _expect(sample.state is State.HELD and sample.parent is s, f"{s.id}: holds a sample that is not held")


def _expect(holds: bool, broken: str) -> None:
    if not holds:
        raise EngineError(f"scheduler: {broken}")


def _rank(session: Session) -> tuple[int, float, int]:
    return session.rank
