"""Roster: which session is in which state. The only place where a state changes or pages are given back.

A finished session whose row is still in flight is a ghost: it keeps its pages until that row is back, because a page that an
outstanding plan may write must not get a new owner.
"""

from bisect import insort

from kilat.base import metrics
from kilat.base.errors import EngineError
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
    metrics.PROMPT_TOKENS,
    metrics.OUTPUT_TOKENS,
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
    """All sessions and the page pool. ``running`` is sorted by rank; ``gone`` collects the ids that left it since the last plan."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = PagePool(config.n_pages, config.page_tokens)
        self.tenants = Tenants(config.tenant_weights)
        self.live: dict[str, Session] = {}
        self.waiting = WaitingQueue()
        self.running: list[Session] = []
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

    def let_go(self, parent: Session) -> None:
        """HELD -> WAITING for the other samples of ``parent``: its prompt is computed, or it will never be."""
        for sample in parent.held:
            sample.state = State.WAITING
            self.n_held -= 1
            self.waiting.push(sample)
        parent.held = []

    def start(self, session: Session, table: PageTable, n_computed: int) -> None:
        """WAITING -> RUNNING with a table that holds the first ``n_computed`` tokens."""
        self.waiting.remove(session)
        session.state = State.RUNNING
        session.table = table
        session.n_computed = session.n_planned = n_computed
        session.front, session.parent = False, None
        self.counts[metrics.WASTED_TOKENS] += max(session.n_lost - n_computed, 0)
        session.n_lost = 0
        insort(self.running, session, key=_rank)

    def preempt(self, session: Session) -> None:
        """RUNNING -> WAITING, in front. Its sealed pages stay findable until others need them; the rest is computed again."""
        if session.n_flight or session.table is None:
            raise EngineError("a session was preempted while a row of it was in flight")
        self.running.remove(session)
        self.gone.append(session.id)
        session.table.release()
        session.table = None
        session.n_lost = session.n_computed
        session.n_computed = session.n_planned = 0
        if session.prompt_logprobs is not None:
            session.prompt_logprobs = [None]
        session.state, session.front = State.WAITING, True
        self.waiting.push(session)
        self.counts[metrics.PREEMPTIONS] += 1

    def finish(self, session: Session, reason: str) -> None:
        """Any state -> FINISHED. The samples it holds go on without it."""
        if session.state is State.RUNNING:
            self.running.remove(session)
            self.gone.append(session.id)
        elif session.state is State.WAITING:
            self.waiting.remove(session)
        elif session.parent is not None:
            self.n_held -= 1
            session.parent.held.remove(session)
        session.state, session.parent = State.FINISHED, None
        del self.live[session.id]
        session.tenant.n_live -= 1
        self.counts[FINISHED[reason]] += 1
        self.let_go(session)
        if session.n_flight:
            self.ghosts.append(session)
        else:
            self._release(session)

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
        owners = [s for s in (*self.running, *self.ghosts) if s.table is not None]
        self.pool.check([s.table.pages for s in owners if s.table is not None])
        by_state = {state: [s for s in self.live.values() if s.state is state] for state in State}
        _expect(set(by_state[State.WAITING]) == set(self.waiting), "the queue is not the waiting sessions")
        _expect(len(by_state[State.WAITING]) == len(self.waiting), "the queue is miscounted")
        _expect(set(by_state[State.RUNNING]) == set(self.running), "the list of running sessions is wrong")
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
    if s.state is State.RUNNING:
        if s.table is None:
            raise EngineError(f"{s.id}: running without pages")
        _expect(s.n_planned <= len(s.table.pages) * page_tokens, f"{s.id}: too few pages")
        _expect(s.table.n_sealed * page_tokens <= s.n_computed, f"{s.id}: sealed before computed")
    else:
        _expect(s.table is None and s.n_flight == 0, f"{s.id}: holds pages or rows without running")
    for sample in s.held:
        _expect(sample.state is State.HELD and sample.parent is s, f"{s.id}: holds a sample that is not held")


def _expect(holds: bool, broken: str) -> None:
    if not holds:
        raise EngineError(f"scheduler: {broken}")


def _rank(session: Session) -> tuple[int, float, int]:
    return session.rank
