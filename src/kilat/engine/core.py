"""The engine: plan, run, commit. One thread owns it; nothing here waits for a network, a clock or a disk.

What may not be added here: a decision (policy/sched), math (models, ops), text (the engine speaks token ids only).
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from kilat.base import metrics
from kilat.base.errors import CapacityError, EngineError, KilatError, RequestError
from kilat.base.ids import branch_id
from kilat.engine.grammar import COMPILE_LIMIT_S, GrammarCompiler, Matcher
from kilat.engine.runner import Flying, Runner
from kilat.policy.sched.plan import StepPlan
from kilat.policy.sched.scheduler import Scheduler
from kilat.wire.messages import SessionEvent
from kilat.wire.sampling import check
from kilat.wire.session import SessionRecord


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts of a running engine that its clients need; sizes in tokens unless named. ``ledger_bytes``: memory by owner."""

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


@dataclass(slots=True)
class _Compiling:
    """A session that waits for its grammar."""

    record: SessionRecord
    future: "Future[Matcher]"
    since_s: float


class Engine:
    """Runs sessions step by step. ``now`` is injected so that tests own the time.

    With ``depth`` 2 the next plan is made while the step before runs; with 1 everything is in line.
    """

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: Runner,
        grammars: GrammarCompiler | None,
        *,
        depth: int = 1,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self.scheduler = scheduler
        self.runner = runner
        self.grammars = grammars
        self.step_count = 0
        self._depth = depth
        self._now = now
        self._flying: deque[tuple[StepPlan, Flying]] = deque()
        self._compiling: dict[str, _Compiling] = {}
        self._step_s = 0.0

    # -- requests -------------------------------------------------------------------------------------------------------------------

    def submit(self, record: SessionRecord) -> None:
        """Take a session. Raises RequestError, LimitError or CapacityError; a grammar is compiled behind this call, and when it is
        bad the session ends with an error event."""
        check(record.params, vocab_size=self.info.vocab_size)
        for token in record.prompt_ids:
            if not 0 <= token < self.info.vocab_size:
                raise RequestError(
                    f"token id {token} in the prompt, allowed 0 to {self.info.vocab_size - 1}", param="prompt"
                )
        if record.params.grammar is None:
            self.scheduler.submit(record, self._now())
            return
        if self.grammars is None:
            raise RequestError(
                "structured output needs a tokenizer, which this engine was started without", param="grammar"
            )
        if record.session_id in self._compiling:
            raise RequestError("a session with this id is live already; use a new id")
        limit = self.scheduler.config.max_waiting
        if len(self._compiling) >= max(limit, 1):
            raise CapacityError(
                f"{len(self._compiling):,} sessions wait for their grammars, limit {limit:,}: try again later"
            )
        future = self.grammars.compile(record.params.grammar)
        self._compiling[record.session_id] = _Compiling(record, future, self._now())

    def abort(self, session_ids: Iterable[str]) -> list[SessionEvent]:
        """Stop sessions in any state; their last events come back. Unknown ids are ignored."""
        events = []
        rest = []
        for session_id in session_ids:
            waiting = self._compiling.pop(session_id, None)
            if waiting is not None:
                events += _ends(waiting.record, "abort")
            else:
                rest.append(session_id)
        return events + self.scheduler.abort(rest, self._now())

    # -- the loop -------------------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._flying or self._compiling) or self.scheduler.has_work

    def step(self) -> list[SessionEvent]:
        """Start at most one step and finish at most one; returns the news. Without anything to do it returns at once."""
        begin = self._now()
        events = self._take_compiled()
        plan = self.scheduler.plan(self._now()) if len(self._flying) < self._depth else None
        if plan is not None:
            self._flying.append((plan, self.runner.launch(plan)))
        if self._flying and (plan is None or len(self._flying) == self._depth):
            done, flying = self._flying.popleft()
            events += self.scheduler.commit(done, flying.result(), self._now())
            self.step_count += 1
            self._step_s += self._now() - begin
        elif plan is None and self._compiling:
            self._await_compile()
        return events

    def _await_compile(self) -> None:
        """Nothing runs: give the compiling threads a moment instead of spinning."""
        first = next(iter(self._compiling.values()))
        if not first.future.done():
            time.sleep(0.001)

    def _take_compiled(self) -> list[SessionEvent]:
        """Submit the sessions whose grammar is ready; end those whose grammar is bad or takes too long."""
        events = []
        for session_id, c in list(self._compiling.items()):
            late = self._now() - c.since_s > COMPILE_LIMIT_S
            if not c.future.done() and not late:
                continue
            del self._compiling[session_id]
            try:
                if not c.future.done():
                    raise RequestError(
                        f"the grammar took over {COMPILE_LIMIT_S:g} s to compile; use a smaller one",
                        param="grammar",
                    )
                c.future.result()
                self.scheduler.submit(c.record, self._now())
            except KilatError as e:
                events += _ends(c.record, "error", e)
            except Exception as e:  # noqa: BLE001  (whatever the library raises, only this session may fail)
                failure = EngineError(f"the grammar could not be compiled: {type(e).__name__}")
                events += _ends(c.record, "error", failure)
        return events

    def close(self) -> None:
        """Stop the threads. Running sessions are dropped without events."""
        self.runner.close()
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
    alone = record.branch > 0 or record.output_ids  # it was adopted: one sample and nothing else
    return [
        SessionEvent(
            branch_id(record.session_id, k),
            record.epoch,
            len(record.output_ids),
            [],
            finish=finish,
            error=error.message if error else None,
            error_code=error.code if error else None,
        )
        for k in range(1 if alone else record.params.n)
    ]
