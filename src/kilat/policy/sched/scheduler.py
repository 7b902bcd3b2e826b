"""Scheduler: submit sessions, plan a step, commit its result. Decides and performs nothing; one thread owns it.

    submit(record)      -> a waiting session (n of them for n > 1)
    plan(now)           -> the rows of the next step
    commit(plan, result)-> the news of that step
    abort(ids)          -> the last events of those sessions

Sessions and pages move between schedulers with freeze, take_frozen, depart, reserve, lend and submit(arrived). Pages that belong to no session
are pinned: whoever got them from reserve, pin, lend or depart owns a pin of each until they go into submit, seal_arrived or unpin.

What may not be added here: math, text, clocks, sockets, and rules about pages (policy/cache), turns (waiting.py) or rows (draft.py).
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from kilat.base import metrics
from kilat.base.errors import CapacityError, EngineError, NotFoundError, RequestError
from kilat.base.ids import branch_id
from kilat.policy.cache.changes import PageChanges
from kilat.policy.sched.config import SchedulerConfig
from kilat.policy.sched.door import Door, check_record
from kilat.policy.sched.draft import Draft
from kilat.policy.sched.moves import Arrived, Departed, usable
from kilat.policy.sched.outcome import Outcome
from kilat.policy.sched.pace import Pace
from kilat.policy.sched.plan import StepPlan, StepResult
from kilat.policy.sched.roster import Roster
from kilat.policy.sched.session import Session, State
from kilat.wire.messages import SessionEvent
from kilat.wire.sampling import MAX_SAMPLES
from kilat.wire.session import SessionRecord


@dataclass(frozen=True, slots=True)
class _Flight:
    """An outstanding plan, the sessions of its rows, and what ``commit`` needs to measure it."""

    plan: StepPlan
    sessions: list[Session]
    sources: list[list[int]]
    planned_s: float
    n_prefill: int


class Scheduler:
    """Continuous batching with chunked prefill over one page pool. ``eos_ids`` end a session's output unless it ignores them.

    Times are seconds of any one clock that does not go back.
    """

    def __init__(self, config: SchedulerConfig, *, model_id: str, eos_ids: Sequence[int]) -> None:
        self.config = config
        self._door = Door(config, model_id, frozenset(eos_ids))
        self._roster = Roster(config)
        self._pace = Pace(config.target_step_s, config.token_multiple)
        self._outcome = Outcome(self._roster)
        self._in_flight: deque[_Flight] = deque()
        self._n_steps = 0
        self._n_numbered = 0

    # -- in and out -----------------------------------------------------------------------------------------------------------------

    def submit(
        self,
        record: SessionRecord,
        now_s: float,
        arrived: Arrived | None = None,
        *,
        hand_over: bool = False,
    ) -> None:
        """Queue a session; ``params.n`` samples come back as ``branch_id(id, k)``. Nothing is changed when it raises.

        A record with ``output_ids`` is adopted: it goes on after its last token, and its events count from ``seq`` =
        ``len(output_ids)``. With ``arrived`` it need not compute those tokens; the pins of all those pages become the session's (what it
        cannot use is given back), but stay the caller's when this raises. With ``hand_over`` it is frozen after the first token that
        it samples here, unless that ends it. A session that is under way already is taken even when the queue is full: its client
        was promised an answer.

        Raises RequestError (no seed, no prompt, id in use, already complete), LimitError (too long for the
        model or the pool) and CapacityError (queue full; says when to come back).
        """
        roster = self._roster
        check_record(record, self.config)
        room = self.config.max_waiting + self.config.max_running - len(roster.running)
        if roster.n_queued >= room and not record.is_under_way:
            raise CapacityError(
                f"{roster.n_queued:,} sessions are waiting, limit {self.config.max_waiting:,}: try again later",
                retry_after_s=self._pace.retry_after_s(roster.n_queued),
            )
        tenant = roster.tenants.find(record.tenant)
        sessions = self._door.open(record, tenant, self._n_numbered, hand_over=hand_over)
        if any(s.id in roster.live for s in sessions):
            raise RequestError("a session with this id is live already; use a new id")
        n_tokens, n_pages = usable(arrived, len(sessions[0].tokens), roster.pool) if arrived else (0, 0)
        if arrived is not None:
            roster.pins.give(arrived.pages)
        self._n_numbered += len(sessions)
        for s in sessions:
            roster.add(s)
        if arrived is not None:
            self._park(sessions[0], arrived.pages, n_tokens, n_pages)

    def _park(self, s: Session, pages: list[int], n_tokens: int, n_pages: int) -> None:
        """Give a new session what it can use of ``pages``; a session that must report its whole prompt can use none."""
        if n_tokens == 0 or s.prompt_logprobs is not None:
            n_tokens = n_pages = 0
        self._roster.pool.release(pages[n_pages:])
        if n_tokens:
            self._roster.park(s, pages[:n_pages], n_tokens)
            self._outcome.seal(s)

    def abort(self, session_ids: Iterable[str], now_s: float) -> list[SessionEvent]:
        """End sessions in any state; an id without ``#`` ends all samples of that request, ``id#0`` sample 0 alone. Unknown ids are
        ignored."""
        events = []
        for session_id in session_ids:
            ids = (
                [session_id.removesuffix("#0")]
                if "#" in session_id
                else [branch_id(session_id, k) for k in range(MAX_SAMPLES)]
            )
            events += [
                self._outcome.end(s, "abort") for s in map(self._roster.live.get, ids) if s is not None
            ]
        if events:
            self._pace.finished(len(events), now_s)
        return events

    def export(self, session_id: str) -> SessionRecord:
        """The portable record of a live session as far as steps are committed; it keeps running here. Raises NotFoundError.

        Sample 0 of a request whose other samples have not started yet stands for all of them: submitting its record elsewhere
        starts them there.
        """
        s = self._find(session_id)
        n_sealed = s.table.n_sealed if s.table is not None else 0
        return replace(
            s.record,
            output_ids=s.tokens[s.n_prompt :],
            page_hashes=s.chain[:n_sealed],
            with_samples=bool(s.held),
        )

    def _find(self, session_id: str) -> Session:
        s = self._roster.live.get(session_id)
        if s is None:
            raise NotFoundError("no live session has this id")
        return s

    # -- sessions on the move -------------------------------------------------------------------------------------------------------

    def freeze(self, session_id: str) -> None:
        """Plan no more rows of a session; it keeps its pages. Rows in flight still count, so it may yet end; if not,
        :meth:`take_frozen` names it when they are back. Freezing it again changes nothing. Raises NotFoundError, also for a sample that
        has not started: that one goes with sample 0."""
        s = self._find(session_id)
        if s.state is State.HELD:
            raise NotFoundError("this sample has not started; it goes with sample 0")
        if s.state is not State.FROZEN:
            self._roster.freeze(s)

    def take_frozen(self) -> list[str]:
        """Ids of sessions that are frozen and have nothing in flight, each told once: they can depart."""
        ready = [s for s in self._roster.frozen if s.n_flight == 0]
        for s in ready:
            self._roster.frozen.remove(s)
        return [s.id for s in ready]

    def depart(self, session_id: str) -> Departed:
        """End a session here without an event; its pages, pinned, are the caller's. Samples it holds go with its record.

        Raises NotFoundError (also for a sample that has not started) and, with nothing changed, EngineError while a row is in flight:
        freeze it and wait for :meth:`take_frozen`.
        """
        s = self._find(session_id)
        if s.state is State.HELD:
            raise NotFoundError("this sample has not started; it goes with sample 0")
        if s.n_flight:
            raise EngineError("the session has a row in flight: freeze it first")
        record = self.export(session_id)
        pages = self._roster.depart(s, -(-s.n_computed // self.config.page_tokens))
        return Departed(record, pages, s.n_computed if pages else 0)

    def computed(self, session_id: str) -> tuple[int, list[int]]:
        """(n, pages): the KV of a session's first n tokens is in these pages, as far as steps are committed. The pages are the session's:
        :meth:`pin` those that a peer is told of. Raises NotFoundError."""
        s = self._find(session_id)
        if s.table is None:
            return 0, []
        return s.n_computed, s.table.pages[: -(-s.n_computed // self.config.page_tokens)]

    # -- pages on the move ----------------------------------------------------------------------------------------------------------

    def reserve(self, n_pages: int) -> list[int] | None:
        """Pinned pages of undefined content, which no step reads or writes; None when the running sessions need them. May evict
        cached pages."""
        if n_pages + self._roster.n_promised() > self._roster.pool.n_available:
            return None
        return self._roster.pins.reserve(n_pages)

    def pin(self, pages: Sequence[int]) -> None:
        """Keep pages of a live session for a peer that reads them, whatever becomes of the session."""
        self._roster.pins.pin(pages)

    def unpin(self, pages: Sequence[int]) -> None:
        """Give pins back, those of one chain in one call from its start; nobody may write reserved pages any more. Raises EngineError,
        and nothing is changed, for a page without pin."""
        self._roster.pins.unpin(pages)

    def lend(self, names: Sequence[bytes]) -> list[int]:
        """Pin the longest known start of a chain of page names; full pages, which nobody writes any more."""
        pages = self._roster.pool.match(names)
        self._roster.pins.pin(pages)
        return pages

    def seal_arrived(self, pages: Sequence[int], names: Sequence[bytes]) -> None:
        """Put full pages that were read from a peer into the index, and give up their pins: they are cached pages now, until somebody
        uses them. Pages that were lent for the chain's start are unpinned after this. Without a prefix cache they become free."""
        if self.config.prefix_cache:
            for page, name in zip(pages, names, strict=True):
                self._roster.pool.seal(page, name)
        self._roster.pins.unpin(pages)

    def watch_pages(self) -> PageChanges:
        """From now on collect which page names can be found; the same collector each time."""
        pool = self._roster.pool
        if pool.changes is None:
            pool.changes = PageChanges()
        return pool.changes

    def page_names(self) -> list[bytes]:
        """All page names that can be found, in no order."""
        return self._roster.pool.names()

    def n_known(self, names: Sequence[bytes]) -> int:
        """How many pages of this chain of names can be found, from its start."""
        return len(self._roster.pool.match(names))

    def watch_evictions(self, hear: Callable[[bytes, int], None]) -> None:
        """Call ``hear(name, page)`` from now on before a cached page is given to somebody else: its content is gone after that."""
        self._roster.pool.on_evict = hear

    @property
    def prefill_token_s(self) -> float | None:
        """Seconds per token of steps that compute prompts, as measured lately; None before the first."""
        return self._pace.s_per_token

    # -- a step ---------------------------------------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute before the next commit. At most ``depth`` plans are outstanding."""
        if len(self._in_flight) >= self.config.depth:
            raise EngineError(
                f"{len(self._in_flight)} plans are outstanding, limit {self.config.depth}: commit one first"
            )
        draft = self._draft()
        while not draft.rows and not self._in_flight:
            # Everybody waits for pages. Admission counts the pages of all known tokens, so this takes a step that gave sessions more
            # tokens than one, or pages that arrived for sessions that cannot start; somebody must make room.
            victim = self._roster.in_the_way()
            if victim is not None:
                self._roster.preempt(victim)
            elif not draft.has_preempted:
                break
            draft = self._draft()
        if not draft.rows:
            return None
        plan = draft.plan(self._n_steps)
        self._n_steps += 1
        for chain in draft.sources:
            self._roster.pins.pin(chain)
        self._in_flight.append(_Flight(plan, draft.sessions, draft.sources, now_s, draft.n_prefill))
        return plan

    def _draft(self) -> Draft:
        draft = Draft(self._roster)
        draft.decode()
        draft.prefill(self._pace)
        return draft

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> list[SessionEvent]:
        """Take in the result of the oldest outstanding plan; returns one event per session with news.

        A row whose session has finished meanwhile is dropped. A row that failed, or whose result makes no sense, ends its session
        alone. Raises EngineError, with nothing changed, when plan and result do not belong here.
        """
        if not self._in_flight or self._in_flight[0].plan is not plan:
            raise EngineError("this is not the oldest outstanding plan")
        if len(result.token_ids) != len(plan.rows):
            raise EngineError(f"the result has {len(result.token_ids)} rows, the plan {len(plan.rows)}")
        flight = self._in_flight.popleft()
        for chain in flight.sources:
            self._roster.pins.unpin(chain)
        self._pace.stepped(flight.planned_s, now_s, plan.n_tokens - flight.n_prefill, flight.n_prefill)
        events = []
        n_finished = 0
        for i, (row, s) in enumerate(zip(plan.rows, flight.sessions)):
            s.n_flight -= 1
            if s.state is State.FINISHED:
                if s.n_flight == 0:
                    self._roster.bury(s)
                continue
            event = self._outcome.row(s, row, i, result)
            if event is not None:
                events.append(event)
                n_finished += event.finish is not None
        if n_finished:
            self._pace.finished(n_finished, now_s)
        return events

    # -- numbers --------------------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a session is live or a plan is outstanding."""
        return bool(self._roster.live or self._in_flight)

    def counters(self) -> dict[str, float]:
        """Numbers that only grow, by their names in base/metrics.py. Prompt tokens count when a session is admitted, prefill tokens (all
        but those of decode rows) when they are computed. Wasted tokens: computed again because of a preemption."""
        return {name: float(n) for name, n in self._roster.counts.items()}

    def gauges(self) -> dict[str, float]:
        """Numbers of this moment, by their names in base/metrics.py."""
        pool = self._roster.pool
        return {
            metrics.SESSIONS_RUNNING: float(len(self._roster.running)),
            metrics.SESSIONS_WAITING: float(self._roster.n_queued),
            metrics.PAGES_FREE: float(pool.n_free),
            metrics.PAGES_USED: float(pool.n_used),
            metrics.PAGES_CACHED: float(pool.n_cached),
            metrics.PAGES_PINNED: float(self._roster.pins.n_pages),
        }

    def check(self) -> None:
        """Raise EngineError if an invariant of states, positions or pages is broken. For tests and idle moments: reads all pages."""
        self._roster.check()
        in_flight = Counter(s for flight in self._in_flight for s in flight.sessions)
        for s in (*self._roster.live.values(), *self._roster.ghosts):
            if s.n_flight != in_flight.pop(s, 0):
                raise EngineError(f"scheduler: {s.id}: rows in flight miscounted")
        if in_flight:
            raise EngineError("scheduler: a row in flight has no session")
