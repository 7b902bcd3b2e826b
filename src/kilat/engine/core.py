"""The engine: plan, run, commit. One thread owns it; nothing here waits for a network, a clock or a disk.

What may not be added here: a decision (policy/sched), math (models, ops), text (the engine speaks token ids only).
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kilat.base import metrics
from kilat.base.errors import CapacityError, EngineError, KilatError, RequestError
from kilat.base.ids import branch_id
from kilat.engine.grammar import COMPILE_LIMIT_S, GrammarCompiler, Matcher
from kilat.engine.kv_memory import PageMemory
from kilat.engine.runner import Flying, Runner
from kilat.engine.timeline import CALLER, COMMIT, NO_REQUESTS, READ_BACK, SCHEDULE, Unwatched, Watcher
from kilat.engine.work import ModelWork
from kilat.policy.cache.changes import PageChanges
from kilat.policy.sched.moves import Arrived, Departed
from kilat.policy.sched.plan import StepPlan
from kilat.policy.sched.scheduler import Scheduler
from kilat.wire.messages import SessionEvent
from kilat.wire.sampling import check
from kilat.wire.session import SessionRecord


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts of a running engine that its clients need; sizes in tokens unless named. ``ledger_bytes``: memory by owner; ``work``: what
    the steps of its model cost."""

    model_id: str
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    page_tokens: int
    n_pages: int
    eos_ids: tuple[int, ...]
    dtype: str
    kernels: str
    ledger_bytes: dict[str, int]
    work: ModelWork


@dataclass(slots=True)
class _Compiling:
    """A session that waits for its grammar. ``arrived`` pages stay pinned for it. ``frozen``: it will go on elsewhere."""

    record: SessionRecord
    arrived: Arrived | None
    hand_over: bool
    future: "Future[Matcher]"
    since_s: float
    frozen: bool = False


class Engine:
    """Runs sessions step by step. ``now`` is injected so that tests own the time.

    With ``depth`` 2 the next plan is made while the step before runs; with 1 everything is in line.
    """

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: Runner,
        pages: PageMemory,
        grammars: GrammarCompiler | None,
        *,
        depth: int = 1,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self.scheduler = scheduler
        self.runner = runner
        self.pages = pages
        self.grammars = grammars
        self.step_count = 0
        self._depth = depth
        self._now = now
        self._flying: deque[tuple[StepPlan, Flying]] = deque()
        self._compiling: dict[str, _Compiling] = {}
        self._frozen: list[str] = []
        self._step_s = 0.0
        self._watcher: Watcher = Unwatched()

    # -- requests -------------------------------------------------------------------------------------------------------------------

    def submit(
        self, record: SessionRecord, arrived: Arrived | None = None, *, hand_over: bool = False
    ) -> None:
        """Take a session, perhaps with pages, perhaps only up to its first token (see ``Scheduler.submit``).

        Raises RequestError, LimitError or CapacityError, and then arrived pages stay the caller's. A grammar is compiled behind this
        call, and when it is bad the session ends with an error event.
        """
        check(record.params, vocab_size=self.info.vocab_size)
        for token in record.prompt_ids:
            if not 0 <= token < self.info.vocab_size:
                raise RequestError(
                    f"token id {token} in the prompt, allowed 0 to {self.info.vocab_size - 1}", param="prompt"
                )
        if record.params.grammar is None:
            self.scheduler.submit(record, self._now(), arrived, hand_over=hand_over)
            return
        if self.grammars is None:
            raise RequestError(
                "structured output needs a tokenizer, which this engine was started without", param="grammar"
            )
        if record.session_id in self._compiling:
            raise RequestError("a session with this id is live already; use a new id")
        limit = self.scheduler.config.max_waiting
        if len(self._compiling) >= max(limit, 1) and not record.is_under_way:
            raise CapacityError(
                f"{len(self._compiling):,} sessions wait for their grammars, limit {limit:,}: try again later"
            )
        future = self.grammars.compile(record.params.grammar)
        self._compiling[record.session_id] = _Compiling(record, arrived, hand_over, future, self._now())

    def abort(self, session_ids: Iterable[str]) -> list[SessionEvent]:
        """Stop sessions in any state; their last events come back. Unknown ids are ignored."""
        events = []
        rest = []
        for session_id in session_ids:
            waiting = self._compiling.pop(session_id, None)
            if waiting is not None:
                events += self._drop(waiting, "abort")
            else:
                rest.append(session_id)
        return events + self.scheduler.abort(rest, self._now())

    # -- sessions and pages on the move: ``kilat.policy.sched.scheduler.Scheduler`` says what each does, may be given and raises ------
    # The thread that owns the engine calls them between steps, with steps in flight or without.

    def freeze(self, session_id: str) -> None:
        """``Scheduler.freeze``; a session that waits for its grammar is frozen at once."""
        waiting = self._compiling.get(session_id)
        if waiting is None:
            self.scheduler.freeze(session_id)
        elif not waiting.frozen:
            waiting.frozen = True
            self._frozen.append(session_id)

    def take_frozen(self) -> list[str]:
        """``Scheduler.take_frozen``: sessions that can :meth:`depart` now. Send the events of earlier steps before their records."""
        asked, self._frozen = self._frozen, []
        ready = [s for s in asked if s in self._compiling and self._compiling[s].frozen]
        return ready + self.scheduler.take_frozen()

    def export(self, session_id: str) -> SessionRecord:
        """``Scheduler.export``: the record of a session that keeps running here."""
        waiting = self._compiling.get(session_id)
        return waiting.record if waiting else self.scheduler.export(session_id)

    def depart(self, session_id: str) -> Departed:
        """``Scheduler.depart``: end it here without an event; its pages are the caller's until :meth:`unpin`."""
        waiting = self._compiling.pop(session_id, None)
        if waiting is None:
            return self.scheduler.depart(session_id)
        pages, n_tokens = (waiting.arrived.pages, waiting.arrived.n_tokens) if waiting.arrived else ([], 0)
        return Departed(waiting.record, pages, n_tokens)

    def computed(self, session_id: str) -> tuple[int, list[int]]:
        """``Scheduler.computed``: how many tokens have their KV in which pages; 0 while it waits for its grammar."""
        return (0, []) if session_id in self._compiling else self.scheduler.computed(session_id)

    def reserve(self, n_pages: int) -> list[int] | None:
        """``Scheduler.reserve``: pages to read into; write them through :attr:`pages`."""
        return self.scheduler.reserve(n_pages)

    def pin(self, pages: Sequence[int]) -> None:
        """``Scheduler.pin``: keep pages of :meth:`computed` for a peer."""
        self.scheduler.pin(pages)

    def unpin(self, pages: Sequence[int]) -> None:
        """``Scheduler.unpin``: when nobody reads or writes them any more."""
        self.scheduler.unpin(pages)

    def lend(self, names: Sequence[bytes]) -> list[int]:
        """``Scheduler.lend``: pin the known start of a chain."""
        return self.scheduler.lend(names)

    def seal_arrived(self, pages: Sequence[int], names: Sequence[bytes]) -> None:
        """``Scheduler.seal_arrived``: full pages that were read become cached ones."""
        self.scheduler.seal_arrived(pages, names)

    def watch_pages(self) -> PageChanges:
        """``Scheduler.watch_pages``: the collector of changes of the index."""
        return self.scheduler.watch_pages()

    def page_names(self) -> list[bytes]:
        """``Scheduler.page_names``: everything that can be found."""
        return self.scheduler.page_names()

    def n_known(self, names: Sequence[bytes]) -> int:
        """``Scheduler.n_known``: pages of this chain that need not be computed."""
        return self.scheduler.n_known(names)

    def watch_evictions(self, hear: Callable[[bytes, int], None]) -> None:
        """``Scheduler.watch_evictions``: within ``hear`` the page can be read through :attr:`pages`, on a device too."""
        self.scheduler.watch_evictions(hear)

    @property
    def prefill_token_s(self) -> float | None:
        """``Scheduler.prefill_token_s``: what a token of a prompt costs."""
        return self.scheduler.prefill_token_s

    # -- the loop -------------------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._flying or self._compiling) or self.scheduler.has_work

    def step(self) -> list[SessionEvent]:
        """Start at most one step and finish at most one; returns the news. Without anything to do it returns at once."""
        begin = self._now()
        self._watcher.mark(SCHEDULE)
        events = self._take_compiled()
        plan = self.scheduler.plan(self._now()) if len(self._flying) < self._depth else None
        if plan is not None:
            self._watcher.launching(plan)
            self._flying.append((plan, self.runner.launch(plan)))
        if self._flying and (plan is None or len(self._flying) == self._depth):
            done, flying = self._flying.popleft()
            self._watcher.mark(READ_BACK)
            result = flying.result()
            self._watcher.mark(COMMIT)
            events += self.scheduler.commit(done, result, self._now())
            self.step_count += 1
            self._step_s += self._now() - begin
        elif plan is None:
            self._await_compile()
        self._watcher.mark(CALLER if self.has_work else NO_REQUESTS)
        return events

    def watch(self, watcher: Watcher) -> None:
        """Tell ``watcher`` what steps do from now on, in place of the watcher before it."""
        self._watcher = self.runner.watcher = watcher

    def prepare(self) -> bool:
        """Use a pause: with no work, do some tens of milliseconds of what makes later steps faster. False when
        nothing is left to do, or has to be waited for."""
        return not self.has_work and (self.pages.prepare() or self.runner.prepare())

    def _await_compile(self) -> None:
        """Nothing runs: give the compiling threads a moment instead of spinning."""
        first = next((c for c in self._compiling.values() if not c.frozen), None)
        if first is not None and not first.future.done():
            time.sleep(0.001)

    def _take_compiled(self) -> list[SessionEvent]:
        """Submit the sessions whose grammar is ready; end those whose grammar is bad or takes too long."""
        events = []
        for session_id, c in list(self._compiling.items()):
            late = self._now() - c.since_s > COMPILE_LIMIT_S
            if c.frozen or (not c.future.done() and not late):
                continue
            del self._compiling[session_id]
            try:
                if not c.future.done():
                    raise RequestError(
                        f"the grammar took over {COMPILE_LIMIT_S:g} s to compile; use a smaller one",
                        param="grammar",
                    )
                c.future.result()
                self.scheduler.submit(c.record, self._now(), c.arrived, hand_over=c.hand_over)
            except KilatError as e:
                events += self._drop(c, "error", e)
            except Exception as e:  # noqa: BLE001  (whatever the library raises, only this session may fail)
                failure = EngineError(f"the grammar could not be compiled: {type(e).__name__}")
                events += self._drop(c, "error", failure)
        return events

    def _drop(self, c: _Compiling, finish: str, error: KilatError | None = None) -> list[SessionEvent]:
        """Give back what a session that never ran was given; its last events."""
        if c.arrived is not None:
            self.scheduler.unpin(c.arrived.pages)
        return _ends(c.record, finish, error)

    def close(self) -> None:
        """Stop the threads. Running sessions are dropped without events."""
        self.runner.close()
        self.pages.close()
        if self.grammars is not None:
            self.grammars.close()

    # -- numbers --------------------------------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, float]:
        """Numbers that only grow: the scheduler's, and seconds spent in steps, in runs and in the model."""
        return {
            **self.scheduler.counters(),
            metrics.STEPS: float(self.step_count),
            metrics.STEP_SECONDS: self._step_s,
            metrics.RUN_SECONDS: self.runner.run_s,
            metrics.MODEL_SECONDS: self.runner.model_s,
        }

    def gauges(self) -> dict[str, float]:
        """Numbers of this moment: the scheduler's, and sessions whose grammar is being compiled."""
        return {**self.scheduler.gauges(), metrics.SESSIONS_COMPILING: float(len(self._compiling))}


def _ends(record: SessionRecord, finish: str, error: KilatError | None = None) -> list[SessionEvent]:
    """The only events of a request that never ran, one for each of its samples."""
    return [
        SessionEvent(
            branch_id(record.session_id, k),
            record.epoch,
            len(record.output_ids) if k == 0 else 0,
            [],
            finish=finish,
            error=error.message if error else None,
            error_code=error.code if error else None,
        )
        for k in range(record.n_sessions)
    ]
