"""Scheduler: submit sessions, plan a step, commit its result. Decides and performs nothing; one thread owns it.

    submit(record)      -> a waiting session (n of them for n > 1)
    plan(now)           -> the rows of the next step
    commit(plan, result)-> the news of that step
    abort(ids)          -> the last events of those sessions

What may not be added here: math, text, clocks, sockets, and rules about pages (policy/cache), turns (waiting.py) or rows (draft.py).
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from kilat.base import metrics
from kilat.base.errors import CapacityError, EngineError, NotFoundError, RequestError
from kilat.base.ids import branch_id
from kilat.policy.sched.config import SchedulerConfig
from kilat.policy.sched.door import Door, check_record
from kilat.policy.sched.draft import Draft
from kilat.policy.sched.pace import Pace
from kilat.policy.sched.plan import Row, StepPlan, StepResult
from kilat.policy.sched.roster import Roster
from kilat.policy.sched.session import Session, State
from kilat.wire.messages import SessionEvent, TokenLogprob
from kilat.wire.sampling import MAX_SAMPLES
from kilat.wire.session import SessionRecord

MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _Flight:
    """An outstanding plan, the sessions of its rows, and what ``commit`` needs to measure it."""

    plan: StepPlan
    sessions: list[Session]
    planned_s: float
    has_prefill: bool


class Scheduler:
    """Continuous batching with chunked prefill over one page pool. ``eos_ids`` end a session's output unless it ignores them.

    Times are seconds of any one clock that does not go back.
    """

    def __init__(self, config: SchedulerConfig, *, model_id: str, eos_ids: Sequence[int]) -> None:
        self.config = config
        self._door = Door(config, model_id, frozenset(eos_ids))
        self._roster = Roster(config)
        self._pace = Pace(config.target_step_s)
        self._in_flight: deque[_Flight] = deque()
        self._n_steps = 0
        self._n_numbered = 0

    # -- in and out -----------------------------------------------------------------------------------------------------------------

    def submit(self, record: SessionRecord, now_s: float) -> None:
        """Queue a session; ``params.n`` samples come back as ``branch_id(id, k)``. Nothing is changed when it raises.

        A record with ``output_ids`` is adopted: it goes on after its last token, and its events count from ``seq`` =
        ``len(output_ids)``. Raises RequestError (no seed, no prompt, id in use, already complete), LimitError (too long for the
        model or the pool) and CapacityError (queue full; says when to come back).
        """
        roster = self._roster
        check_record(record, self.config)
        room = self.config.max_waiting + self.config.max_running - len(roster.running)
        if roster.n_queued >= room:
            raise CapacityError(
                f"{roster.n_queued:,} sessions are waiting, limit {self.config.max_waiting:,}: try again later",
                retry_after_s=self._pace.retry_after_s(roster.n_queued),
            )
        sessions = self._door.open(record, roster.tenants.find(record.tenant), self._n_numbered)
        if any(s.id in roster.live for s in sessions):
            raise RequestError("a session with this id is live already; use a new id")
        self._n_numbered += len(sessions)
        for s in sessions:
            roster.add(s)

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
            events += [self._end(s, "abort") for s in map(self._roster.live.get, ids) if s is not None]
        if events:
            self._pace.finished(len(events), now_s)
        return events

    def export(self, session_id: str) -> SessionRecord:
        """The portable record of a live session as far as steps are committed; it keeps running here. Raises NotFoundError.

        Sample 0 of a request whose other samples have not started yet stands for all of them: submitting its record elsewhere
        starts them there.
        """
        s = self._roster.live.get(session_id)
        if s is None:
            raise NotFoundError("no live session has this id")
        n_sealed = s.table.n_sealed if s.table is not None else 0
        return replace(s.record, output_ids=s.tokens[s.n_prompt :], page_hashes=s.chain[:n_sealed])

    # -- a step ---------------------------------------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute before the next commit. At most ``depth`` plans are outstanding."""
        if len(self._in_flight) >= self.config.depth:
            raise EngineError(
                f"{len(self._in_flight)} plans are outstanding, limit {self.config.depth}: commit one first"
            )
        draft = self._draft()
        while not draft.rows and not self._in_flight and len(self._roster.running) > 1:
            # Everybody waits for pages. Admission counts the pages of all known tokens, so this takes a step that gave sessions more
            # tokens than one; the youngest must make room.
            self._roster.preempt(self._roster.running[-1])
            draft = self._draft()
        if not draft.rows:
            return None
        plan = draft.plan(self._n_steps)
        self._n_steps += 1
        self._in_flight.append(_Flight(plan, draft.sessions, now_s, draft.has_prefill))
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
        self._pace.stepped(flight.planned_s, now_s, plan.n_tokens, prefill=flight.has_prefill)
        events = []
        n_finished = 0
        for i, (row, s) in enumerate(zip(plan.rows, flight.sessions)):
            s.n_flight -= 1
            if s.state is State.FINISHED:
                if s.n_flight == 0:
                    self._roster.bury(s)
                continue
            event = self._commit_row(s, row, i, result)
            if event is not None:
                events.append(event)
                n_finished += event.finish is not None
        if n_finished:
            self._pace.finished(n_finished, now_s)
        return events

    def _commit_row(self, s: Session, row: Row, i: int, result: StepResult) -> SessionEvent | None:
        if i in result.failed:
            return self._end(s, "error", error=result.failed[i])
        try:
            s.n_computed = row.start + len(row.token_ids)
            if row.prompt_logprobs and s.prompt_logprobs is not None:
                s.prompt_logprobs += result.prompt_logprobs[i]
            if not row.sample:
                self._seal(s)
                return None
            ids, finish, stop_id = self._take_output(s, i, result)
            logprobs = result.logprobs[i][: len(ids)] if s.params.logprobs is not None else None
            self._seal(s)
        except Exception as e:  # noqa: BLE001  (a result that breaks one session's state must not touch the others)
            return self._end(
                s, "error", error=f"the step's result could not be used ({type(e).__name__}: {e})"
            )
        self._roster.counts[metrics.OUTPUT_TOKENS] += len(ids)
        if s.held:
            self._roster.let_go(s)
        if finish is not None:
            return self._end(s, finish, ids, stop_id=stop_id, logprobs=logprobs)
        return self._event(s, ids, logprobs=logprobs)

    def _take_output(
        self, s: Session, i: int, result: StepResult
    ) -> tuple[list[int], str | None, int | None]:
        ids = result.token_ids[i]
        stopped = i in result.stopped
        if not ids and not stopped:
            raise EngineError("no token was sampled")
        if any(type(token) is not int or not 0 <= token <= MAX_TOKEN_ID for token in ids):
            raise EngineError("a sampled id is no token id")
        if s.n_flight and len(ids) > 1:
            raise EngineError("more than one token was sampled while the next step was planned for one")
        taken, finish, stop_id = s.take_output(ids)
        if stopped and finish != "stop":
            finish = "stop"
        return taken, finish, stop_id

    def _seal(self, s: Session) -> None:
        """Name the pages that this step has filled, so that others can find them."""
        n_pages = s.n_computed // self.config.page_tokens
        if s.table is not None and n_pages > s.table.n_sealed and self.config.prefix_cache:
            s.table.seal(s.name_pages(n_pages, self.config.page_tokens), n_pages)

    # -- events ---------------------------------------------------------------------------------------------------------------------

    def _end(
        self,
        s: Session,
        finish: str,
        ids: Sequence[int] = (),
        *,
        stop_id: int | None = None,
        logprobs: list[TokenLogprob] | None = None,
        error: str | None = None,
    ) -> SessionEvent:
        """Finish a session; returns its last event."""
        event = self._event(s, ids, finish=finish, stop_id=stop_id, logprobs=logprobs, error=error)
        self._roster.finish(s, finish)
        return event

    def _event(
        self,
        s: Session,
        ids: Sequence[int],
        *,
        finish: str | None = None,
        stop_id: int | None = None,
        logprobs: list[TokenLogprob] | None = None,
        error: str | None = None,
    ) -> SessionEvent:
        seq = s.seq
        s.seq += 1
        n_hit = 0
        prompt_logprobs = None
        if not s.has_spoken:
            s.has_spoken = True
            n_hit = s.n_hit or 0
            if finish in (None, "stop", "length"):
                prompt_logprobs, s.prompt_logprobs = s.prompt_logprobs, None
        return SessionEvent(
            session_id=s.id,
            epoch=s.record.epoch,
            seq=seq,
            token_ids=list(ids),
            finish=finish,
            stop_id=stop_id,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=n_hit,
            error=error,
            error_code=EngineError.code if error is not None else None,
        )

    # -- numbers --------------------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a session is live or a plan is outstanding."""
        return bool(self._roster.live or self._in_flight)

    def counters(self) -> dict[str, float]:
        """Numbers that only grow, by their names in base/metrics.py. Wasted tokens: computed again because of a preemption."""
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
