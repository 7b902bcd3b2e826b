"""The worker's loop: take messages, run a step, send its news.

A session that cannot be taken is refused alone. An error in a step is the end of the process, for the engine's state is unknown.
"""

import time

from kilat.base.errors import CapacityError, EngineError, KilatError
from kilat.base.ids import branch_id
from kilat.base.log import event, get_logger
from kilat.cluster.worker.beat import Pulse
from kilat.cluster.worker.channel import Channel
from kilat.cluster.worker.engine import AnyEngine
from kilat.cluster.worker.mover import Mover, Roads
from kilat.policy.sched.moves import Arrived
from kilat.wire.messages import Abort, Drain, Hello, Ping, Refused, SessionEvent, StepEvents, Submit, ToWorker
from kilat.wire.session import SessionRecord

IDLE_WAIT_S = 0.1
STUCK_WAIT_S = 0.001
SNAPSHOT_S = 0.2
PATIENCE = 0.25
"""Of the time of a step: what a step may be late for a session whose pages are almost here."""

_log = get_logger("worker")


class WorkerLoop:
    """Drives one engine until it is drained. ``pulse`` is kept up to date for the beat."""

    def __init__(
        self,
        worker_id: str,
        engine: AnyEngine,
        channel: Channel,
        pulse: Pulse,
        roads: Roads | None = None,
        *,
        offer_s: float = 30.0,
    ) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._channel = channel
        self._pulse = pulse
        self._mover = Mover(
            worker_id,
            engine,
            engine.info.page_tokens,
            roads,
            send=channel.send,
            send_events=self._send_events,
            submit=self._submit,
            offer_s=offer_s,
        )
        self._live: set[str] = set()
        self._drain_until_s: float | None = None
        self._snapshot_at_s = 0.0
        self._step_s = 0.0

    def close(self) -> None:
        """After :meth:`run`: end the reads of pages. The engine may be closed then."""
        self._mover.close()

    def drain(self, deadline_s: float) -> None:
        """Take no new sessions; :meth:`run` returns when the running ones have ended, which happens within ``deadline_s`` seconds.

        May be called from a signal handler. A second call may only bring the end nearer.
        """
        until_s = time.monotonic() + deadline_s
        self._drain_until_s = until_s if self._drain_until_s is None else min(until_s, self._drain_until_s)
        self._pulse.draining = True

    def run(self) -> None:
        """Say hello, then serve until drained. Whatever a step raises is raised here."""
        self._channel.send(self._hello())
        self._tell_status()
        event(_log, "ready", worker=self._worker_id)
        wait_s = IDLE_WAIT_S
        while not self._drained():
            for message in self._channel.receive(wait_s):
                self._handle(message)
            self._mover.poll(PATIENCE * self._step_s)
            wait_s = self._step() if self._engine.has_work else self._pause()
            self._mover.after_step()
            if self._mover.is_reading:
                wait_s = min(wait_s, STUCK_WAIT_S)
            if time.monotonic() - self._snapshot_at_s > SNAPSHOT_S:
                self._snapshot()
        self._mover.keep_pages()

    def _step(self) -> float:
        """One step; returns how long the loop may wait for messages before the next."""
        engine, pulse = self._engine, self._pulse
        before = engine.step_count
        pulse.busy = True
        began_s = pulse.step_began_s = time.monotonic()
        try:
            events = engine.step()
        finally:
            pulse.step_began_s = None
        self._step_s = time.monotonic() - began_s
        pulse.step = engine.step_count
        self._mover.tell_pages()
        self._send_events(events)
        if not engine.has_work:
            pulse.busy = False
            self._live.clear()
        # Work that cannot go on yet (a grammar is being compiled): do not spin.
        return 0.0 if events or engine.step_count != before else STUCK_WAIT_S

    def _pause(self) -> float:
        """Without work: let the engine prepare for later; returns as :meth:`_step`."""
        return 0.0 if self._engine.prepare() else IDLE_WAIT_S

    def _send_events(self, events: list[SessionEvent]) -> None:
        if events:
            self._live.difference_update(e.session_id for e in events if e.finish is not None)
            self._channel.send(StepEvents(self._engine.step_count, events))

    def _handle(self, message: ToWorker) -> None:
        if isinstance(message, Submit):
            if self._drain_until_s is not None:
                self._refuse(message.record, _draining())
            else:
                self._mover.submit(message)
        elif isinstance(message, Abort):
            events = self._mover.abort(message.session_ids)
            self._send_events(events + self._engine.abort(message.session_ids))
        elif isinstance(message, Drain):
            self.drain(message.deadline_s)
        elif isinstance(message, Ping):
            self._tell_status()
        else:
            self._mover.handle(message)

    def _submit(self, record: SessionRecord, arrived: Arrived | None, hand_over: bool) -> bool:
        try:
            if self._drain_until_s is not None:
                raise _draining()
            self._engine.submit(record, arrived, hand_over=hand_over)
        except KilatError as e:
            self._refuse(record, e)
        except Exception:  # noqa: BLE001  (logged; only this session may fail)
            _log.exception("a session could not be taken")
            self._refuse(record, EngineError("the engine failed to take this request", code="internal_error"))
        else:
            self._live.update(branch_id(record.session_id, k) for k in range(record.n_sessions))
            return True
        return False

    def _refuse(self, record: SessionRecord, e: KilatError) -> None:
        after_s = e.retry_after_s if isinstance(e, CapacityError) else 1.0
        self._channel.send(
            Refused(record.session_id, e.message, e.code, e.status, e.retryable, e.param, after_s)
        )

    def _drained(self) -> bool:
        until_s = self._drain_until_s
        if until_s is None:
            return False
        if not self._engine.has_work and not self._mover.is_busy:
            return True
        if time.monotonic() < until_s:
            return False
        event(_log, "drain_deadline", aborted=len(self._live))
        self._send_events(self._mover.abort_all() + self._engine.abort(sorted(self._live)))
        return True

    def _tell_status(self) -> None:
        self._snapshot()
        self._channel.send(self._pulse.status())

    def _snapshot(self) -> None:
        """Copy the engine's numbers, which only this thread may ask for."""
        self._snapshot_at_s = time.monotonic()
        self._pulse.counters = {**self._engine.counters(), **self._mover.counters()}
        self._pulse.gauges = {**self._engine.gauges(), **self._mover.gauges()}
        self._pulse.pages_seq = self._mover.pages_seq

    def _hello(self) -> Hello:
        info = self._engine.info
        return Hello(
            worker_id=self._worker_id,
            model_id=info.model_id,
            max_model_len=info.max_model_len,
            max_num_seqs=info.max_num_seqs,
            vocab_size=info.vocab_size,
            page_tokens=info.page_tokens,
            n_pages=info.n_pages,
            eos_ids=list(info.eos_ids),
            kernels=info.kernels,
            ledger_bytes=info.ledger_bytes,
            layout=self._mover.layout,
            endpoints=self._mover.endpoints,
        )


def _draining() -> CapacityError:
    return CapacityError("the worker is shutting down: try again soon", status=503)
