"""SimWorker: one worker process in virtual time. Scheduler and mover are the real ones; model, wires and pages' content are not."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kilat.base import metrics
from kilat.base.errors import CapacityError, KilatError
from kilat.policy.sched.config import SchedulerConfig
from kilat.policy.sched.moves import Arrived
from kilat.policy.sched.plan import StepPlan
from kilat.policy.sched.scheduler import Scheduler
from kilat.sim.agenda import Agenda
from kilat.sim.faults import Fault
from kilat.sim.model import EOS, VOCAB, Runner, StepCost
from kilat.wire import messages as wire
from kilat.wire.kv import Endpoint, KvLayout
from kilat.wire.session import SessionRecord

STATUS_EVERY_S = 0.5
MODEL_ID = "sim"
"""Gauge: number of the last PagesChanged, so that the loss of one that no other follows is noticed."""


class Crashed(Exception):
    """The process has ended in the middle of something: unwinds what it was doing."""


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """What all workers of a cluster have in common. ``page_move_s``: time to read one page from a peer, which ``owner_sends`` says takes
    the owner's help (a socket) or none (shared memory). ``content``: whether pages hold tokens (see ``Runner``)."""

    scheduler: SchedulerConfig
    cost: StepCost = field(default_factory=StepCost)
    page_move_s: float = 0.0002
    owner_sends: bool = False
    content: bool = True


class PageMover(Protocol):
    """What a worker does about pages and sessions that come and go, between steps (``cluster.worker.mover.Mover``)."""

    @property
    def endpoints(self) -> list[Endpoint]: ...

    @property
    def layout(self) -> KvLayout | None: ...

    @property
    def is_busy(self) -> bool: ...

    def submit(self, message: wire.Submit) -> None: ...

    def handle(self, message: wire.ToWorker) -> None: ...

    def abort(self, session_ids: Iterable[str]) -> list[wire.SessionEvent]: ...

    def poll(self) -> None: ...

    def after_step(self) -> None: ...


class SimEngine:
    """A scheduler as an engine shows it: without the time as an argument. Everything else is the scheduler's own."""

    def __init__(self, scheduler: Scheduler, agenda: Agenda) -> None:
        self._scheduler = scheduler
        self._agenda = agenda

    def submit(self, record: SessionRecord, arrived: Arrived | None, *, hand_over: bool) -> None:
        self._scheduler.submit(record, self._agenda.now_s, arrived, hand_over=hand_over)

    def abort(self, session_ids: Iterable[str]) -> list[wire.SessionEvent]:
        return self._scheduler.abort(session_ids, self._agenda.now_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


class SimWorker:
    """One life of one worker. ``send`` puts a message on the wire to the gateway, ``peer`` finds another live worker by its id,
    ``make_mover`` gives it its mover.

    ``seconds``: time spent in steps. ``edges``: how many edges there have been.
    """

    def __init__(
        self,
        worker_id: str,
        shape: WorkerShape,
        agenda: Agenda,
        send: Callable[["SimWorker", wire.FromWorker], None],
        peer: Callable[[str], "SimWorker | None"],
        make_mover: Callable[["SimWorker"], PageMover],
        fault: Fault | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.shape = shape
        self.page_tokens = shape.scheduler.page_tokens
        self.agenda = agenda
        self.scheduler = Scheduler(shape.scheduler, model_id=MODEL_ID, eos_ids=[EOS])
        self.runner = Runner(shape.scheduler.n_pages, self.page_tokens, content=shape.content)
        self.engine = SimEngine(self.scheduler, agenda)
        self.fault = fault
        self.alive = True
        self.frozen_until_s = 0.0
        self.seconds = 0.0
        self.edges = 0
        self.on_freeze: Callable[[SimWorker, float], None] = lambda worker, seconds: None
        self.on_crash: Callable[[SimWorker], None] = lambda worker: None
        self.peer = peer
        self._send = send
        self._inbox: deque[wire.ToWorker] = deque()
        self._in_flight: deque[tuple[StepPlan, float]] = deque()
        self._n_steps = 0
        self._last_change = -1
        self.mover = make_mover(self)
        self._begin(self._hello)

    # -- life -------------------------------------------------------------------------------------------------------------------------

    def _begin(self, call: Callable[[], None], delay_s: float = 0.0) -> None:
        self.agenda.after(delay_s, lambda: self._guarded(call))

    def _guarded(self, call: Callable[[], None]) -> None:
        """Make a call of this process: not when it has ended, later when it stands still."""
        if not self.alive:
            return
        if self.agenda.now_s < self.frozen_until_s:
            self._begin(call, self.frozen_until_s - self.agenda.now_s)
            return
        try:
            if self._edge():
                self._begin(call, self.frozen_until_s - self.agenda.now_s)
                return
            call()
        except Crashed:
            self.crash()

    def _edge(self) -> bool:
        """Count an edge; True when the process stands still from now on. Raises Crashed."""
        fault = self.fault
        self.edges += 1
        if fault is None or self.edges <= fault.edge:
            return False
        self.fault = None
        if fault.freeze_s is None:
            raise Crashed
        self.frozen_until_s = self.agenda.now_s + fault.freeze_s
        self.on_freeze(self, fault.freeze_s)
        return True

    def crash(self) -> None:
        """The process ends: nothing it holds can be read any more."""
        if self.alive:
            self.alive = False
            self.on_crash(self)

    def send(self, message: wire.FromWorker) -> None:
        """Put a message on the wire; the process may end or stand still before it does."""
        if isinstance(message, wire.PagesChanged):
            self._last_change = message.seq
        self._edge()
        self._send(self, message)

    def send_events(self, events: list[wire.SessionEvent]) -> None:
        if events:
            self.send(wire.StepEvents(self._n_steps, events))

    def _hello(self) -> None:
        config = self.shape.scheduler
        self.send(
            wire.Hello(
                worker_id=self.worker_id,
                model_id=MODEL_ID,
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                vocab_size=VOCAB,
                page_tokens=self.page_tokens,
                n_pages=config.n_pages,
                eos_ids=[EOS],
                kernels="none",
                layout=self.mover.layout,
                endpoints=self.mover.endpoints,
            )
        )
        self._status()

    def _status(self) -> None:
        counters = {
            **self.scheduler.counters(),
            metrics.STEP_SECONDS: self.seconds,
            metrics.STEPS: float(self._n_steps),
        }
        busy = self.scheduler.has_work or self.mover.is_busy
        gauges = self.scheduler.gauges()
        self.send(wire.Status(self._n_steps, busy, False, counters, gauges, self._last_change))
        self.wake()
        self._begin(self._status, STATUS_EVERY_S)

    # -- messages ---------------------------------------------------------------------------------------------------------------------

    def deliver(self, message: wire.ToWorker) -> None:
        """A message is there; it is handled between steps."""
        self._inbox.append(message)
        self.wake()

    def wake(self) -> None:
        """Something may have changed: look again, unless a step is running, after which it will."""
        if not self._in_flight:
            self._begin(self._turn)

    def _turn(self) -> None:
        """What the loop of the process does between two steps."""
        while self._inbox:
            self._handle(self._inbox.popleft())
        self.mover.poll()
        self.mover.after_step()
        while len(self._in_flight) < self.shape.scheduler.depth:
            plan = self.scheduler.plan(self.agenda.now_s)
            if plan is None:
                return
            begin_s = max([self.agenda.now_s, *(end_s for _, end_s in self._in_flight)])
            seconds = self.shape.cost.seconds(plan)
            self._in_flight.append((plan, begin_s + seconds))
            self._begin(self._step_done, begin_s + seconds - self.agenda.now_s)

    def _step_done(self) -> None:
        plan, _ = self._in_flight.popleft()
        self.seconds += self.shape.cost.seconds(plan)
        result = self.runner.run(plan)
        events = self.scheduler.commit(plan, result, self.agenda.now_s)
        self._n_steps += 1
        self.send_events(events)
        self.mover.after_step()
        self._turn()

    def _handle(self, message: wire.ToWorker) -> None:
        if isinstance(message, wire.Submit):
            self.mover.submit(message)
        elif isinstance(message, wire.Abort):
            self.send_events(self.mover.abort(message.session_ids) + self.engine.abort(message.session_ids))
        else:
            self.mover.handle(message)

    def take(self, record: SessionRecord, arrived: Arrived | None, hand_over: bool) -> bool:
        """Give a session to the scheduler; False when it was refused, which the gateway is told."""
        try:
            self.engine.submit(record, arrived, hand_over=hand_over)
        except KilatError as e:
            after_s = e.retry_after_s if isinstance(e, CapacityError) else 1.0
            self.send(
                wire.Refused(record.session_id, e.message, e.code, e.status, e.retryable, e.param, after_s)
            )
            return False
        return True
