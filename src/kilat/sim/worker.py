"""SimWorker: one worker process in virtual time. The scheduler is the real one; model, wires and pages' content are not."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kilat.base import metrics
from kilat.policy.sched.config import SchedulerConfig
from kilat.policy.sched.plan import StepPlan
from kilat.policy.sched.scheduler import Scheduler
from kilat.sim.agenda import Agenda
from kilat.sim.faults import Fault
from kilat.sim.model import EOS, VOCAB, Runner, StepCost
from kilat.sim.mover import Mover, Read
from kilat.wire import messages as wire
from kilat.wire.kv import Endpoint, KvLayout

STATUS_EVERY_S = 0.5
MODEL_ID = "sim"
PAGES_SEQ = "kilat_pages_seq"
"""Gauge: number of the last PagesChanged, so that the loss of one that no other follows is noticed."""


class Crashed(Exception):
    """The process has ended in the middle of something: unwinds what it was doing."""


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """What all workers of a cluster have in common. ``page_move_s``: time to read one page from a peer. ``content``: whether pages hold
    tokens (see ``Runner``)."""

    scheduler: SchedulerConfig
    cost: StepCost = field(default_factory=StepCost)
    page_move_s: float = 0.0002
    content: bool = True


class SimWorker:
    """One life of one worker. ``send`` puts a message on the wire to the gateway, ``peer`` finds another live worker by its id.

    ``seconds``: time spent in steps. ``edges``: how many edges there have been.
    """

    def __init__(
        self,
        worker_id: str,
        shape: WorkerShape,
        agenda: Agenda,
        send: Callable[["SimWorker", wire.FromWorker], None],
        peer: Callable[[str], "SimWorker | None"],
        fault: Fault | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.shape = shape
        self.page_tokens = shape.scheduler.page_tokens
        self.agenda = agenda
        self.scheduler = Scheduler(shape.scheduler, model_id=MODEL_ID, eos_ids=[EOS])
        self.runner = Runner(shape.scheduler.n_pages, self.page_tokens, content=shape.content)
        self.mover = Mover(self)
        self.fault = fault
        self.alive = True
        self.frozen_until_s = 0.0
        self.seconds = 0.0
        self.edges = 0
        self.on_freeze: Callable[[SimWorker, float], None] = lambda worker, seconds: None
        self.on_crash: Callable[[SimWorker], None] = lambda worker: None
        self._send = send
        self._peer = peer
        self._inbox: deque[wire.ToWorker] = deque()
        self._in_flight: deque[tuple[StepPlan, float]] = deque()
        self._n_steps = 0
        self._n_changes = 0
        self._changes = self.scheduler.watch_pages()
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

    def now_s(self) -> float:
        return self.agenda.now_s

    def send(self, message: wire.FromWorker) -> None:
        self._edge()
        self._send(self, message)

    def _hello(self) -> None:
        config = self.shape.scheduler
        layout = KvLayout(1, self.page_tokens, 1, 1, "int32", 4 * self.page_tokens, MODEL_ID)
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
                layout=layout,
                endpoints=[Endpoint("sim", self.worker_id.encode())],
            )
        )
        self._status()

    def _status(self) -> None:
        counters = {
            **self.scheduler.counters(),
            metrics.STEP_SECONDS: self.seconds,
            metrics.STEPS: float(self._n_steps),
        }
        busy = self.scheduler.has_work or not self.mover.is_idle
        gauges = {**self.scheduler.gauges(), PAGES_SEQ: float(self._n_changes - 1)}
        self.send(wire.Status(self._n_steps, busy, False, counters, gauges))
        self.mover.tick()
        if not self._in_flight:
            self._turn()  # pages that came back may be what waiting sessions need
        self._begin(self._status, STATUS_EVERY_S)

    # -- messages ---------------------------------------------------------------------------------------------------------------------

    def deliver(self, message: wire.ToWorker) -> None:
        """A message is there; it is handled between steps."""
        self._inbox.append(message)
        if not self._in_flight:
            self._begin(self._turn)

    def _turn(self) -> None:
        """What the loop of the process does between two steps."""
        while self._inbox:
            self._handle(self._inbox.popleft())
        self.mover.after_step()
        self._tell_pages()
        while len(self._in_flight) < self.shape.scheduler.depth:
            plan = self.scheduler.plan(self.agenda.now_s)
            if plan is None:
                return
            begin_s = max([self.agenda.now_s, *(end_s for _, end_s in self._in_flight)])
            seconds = self.shape.cost.seconds(plan)
            self.seconds += seconds
            self._in_flight.append((plan, begin_s + seconds))
            self._begin(self._step_done, begin_s + seconds - self.agenda.now_s)

    def _step_done(self) -> None:
        plan, _ = self._in_flight.popleft()
        result = self.runner.run(plan)
        events = self.scheduler.commit(plan, result, self.agenda.now_s)
        self._n_steps += 1
        if events:
            self.send(wire.StepEvents(plan.step, events))
        self._turn()

    def _handle(self, message: wire.ToWorker) -> None:
        if isinstance(message, wire.Submit):
            self.mover.submit(message)
        elif isinstance(message, wire.Abort):
            self.mover.abort(message)
            events = self.scheduler.abort(message.session_ids, self.agenda.now_s)
            if events:
                self.send(wire.StepEvents(self._n_steps, events))
        elif isinstance(message, wire.Fetch):
            self.mover.fetch(message)
        elif isinstance(message, wire.Adopt):
            self.mover.adopt(message)
        elif isinstance(message, wire.Export):
            self.mover.export(message.session_ids)
        elif isinstance(message, wire.Lend):
            self.mover.lend(message)
        elif isinstance(message, wire.Release):
            self.mover.release(message.move_ids)
        elif isinstance(message, wire.Resync):
            self._changes.take()
            self._send_pages(wire.PagesChanged(0, self.scheduler.page_names(), [], whole=True))

    def _tell_pages(self) -> None:
        if self._changes:
            stored, dropped = self._changes.take()
            self._send_pages(wire.PagesChanged(0, stored, dropped))

    def _send_pages(self, change: wire.PagesChanged) -> None:
        numbered = wire.PagesChanged(self._n_changes, change.stored, change.dropped, change.whole)
        self._n_changes += 1
        self.send(numbered)

    # -- pages ------------------------------------------------------------------------------------------------------------------------

    def read(self, read: Read) -> None:
        """Copy pages of a peer. It goes on while this process does other things, and even while it stands still."""
        seconds = len(read.take) * self.shape.page_move_s
        self.agenda.after(seconds, lambda: self._copied(read))

    def _copied(self, read: Read) -> None:
        owner = self._peer(read.offer.owner)
        ok = owner is not None and read.offer.move_id in owner.mover.offers
        if ok and owner is not None and self.runner.pages is not None and owner.runner.pages is not None:
            for i, page in zip(read.take, read.pages):
                self.runner.pages[page] = list(owner.runner.pages[read.offer.pages[i]])
        self._begin(lambda: self._read_done(read, ok))

    def _read_done(self, read: Read, ok: bool) -> None:
        self.mover.on_read(read, ok, "" if ok else "the owner has taken its pages back")
        if not self._in_flight:
            self._turn()
