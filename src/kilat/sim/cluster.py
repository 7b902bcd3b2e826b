"""Cluster: workers, the wires to the gateway's dispatcher, faults, and what must hold when all is over."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kilat.base import metrics
from kilat.base.errors import KilatError
from kilat.base.ids import branch_id
from kilat.sim.agenda import Agenda
from kilat.sim.faults import Faults
from kilat.sim.model import expected
from kilat.sim.worker import PageMover, SimWorker, WorkerShape
from kilat.wire import messages as wire
from kilat.wire.codec import decode_from_worker, decode_to_worker, encode
from kilat.wire.session import SessionRecord

Effects = Sequence[tuple[str, wire.ToWorker]]
Weights = tuple[float, float]

TICK_S = 0.1
SILENT_S = 1.0
"""A worker that stands still for so long is taken for dead and ended."""
RESTART_S = 0.2
SETTLE_S = 8.0
"""After the last request has ended: time for all deadlines to pass."""

BEST_EFFORT = (
    wire.PagesChanged,
    wire.Status,
    wire.Fetched,
    wire.Fetch,
    wire.Lend,
    wire.Release,
    wire.Resync,
    wire.Peers,
    wire.Abort,
    wire.Announce,
    wire.Export,
)
"""Messages whose loss may cost time but nothing else; an Offered without a record is one too."""


STRAY_S = 0.3


def _is_best_effort(message: wire.ToWorker | wire.FromWorker) -> bool:
    return isinstance(message, BEST_EFFORT) or (isinstance(message, wire.Offered) and message.record is None)


@dataclass(slots=True)
class End:
    """What became of one sample: its ``token_ids``, and ``error`` when it was not finished."""

    token_ids: list[int]
    error: KilatError | None = None


class Control(Protocol):
    """The deciding part of a gateway. It returns the messages that are to be sent; ``now_s`` is virtual time."""

    def expect(self, worker_id: str, name: str, weights: Weights, now_s: float) -> None: ...

    def lost(self, worker_id: str, now_s: float) -> Effects: ...

    def on_message(self, worker_id: str, message: wire.FromWorker, now_s: float) -> Effects: ...

    def submit(self, record: SessionRecord, now_s: float) -> Effects:
        """Raises KilatError when it is refused at the door."""

    def cancel(self, session_id: str, n: int, now_s: float) -> Effects: ...

    def retire(self, worker_id: str, now_s: float) -> Effects: ...

    def tick(self, now_s: float) -> Effects: ...

    def ends(self) -> list[tuple[str, End]]:
        """Every end of a sample that was told to its reader, in order; a sample that ended twice is there twice."""

    def held_pages(self, worker_id: str) -> set[bytes]:
        """Names that the gateway believes this worker to hold, once it is told the number of the worker's last message."""

    def leftovers(self) -> list[str]:
        """What is still remembered of requests and moves; nothing, once all have ended."""


class Cluster:
    """``weights``: role shares by the name of a worker; ``workers`` are those that live, by name. Everything random comes from ``rng``.
    ``make_mover`` gives each worker its mover."""

    def __init__(
        self,
        control: Control,
        shape: WorkerShape,
        weights: dict[str, Weights],
        faults: Faults,
        rng: random.Random,
        make_mover: Callable[[SimWorker], PageMover],
    ) -> None:
        self.make_mover = make_mover
        self.agenda = Agenda()
        self.control = control
        self.shape = shape
        self.weights = weights
        self.faults = faults
        self.rng = rng
        self.workers: dict[str, SimWorker] = {}
        self.broken: list[str] = []
        self.requests: dict[str, SessionRecord] = {}
        self.cancelled: set[str] = set()
        self.refused: dict[str, KilatError] = {}
        self.n_restarts = 0
        self._n_lives: dict[str, int] = {}
        self._by_id: dict[str, SimWorker] = {}
        self._gone: set[str] = set()
        self._wire_free_s: dict[tuple[str, bool], float] = {}
        self._epochs: dict[str, int] = {}
        for name in weights:
            self._start(name)
        self.agenda.after(TICK_S, self._tick)

    # -- processes --------------------------------------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        life = self._n_lives[name] = self._n_lives.get(name, -1) + 1
        self.n_restarts += life > 0
        worker_id = f"{name}.{life}"
        worker = SimWorker(
            worker_id,
            self.shape,
            self.agenda,
            self._from_worker,
            self._find,
            self.make_mover,
            self.faults.by_worker.get(worker_id),
        )
        worker.on_crash = lambda w: self._ended(name, w)
        worker.on_freeze = lambda w, seconds: self._frozen(name, w, seconds)
        self.workers[name] = self._by_id[worker_id] = worker
        self.control.expect(worker_id, name, self.weights[name], self.agenda.now_s)

    def _find(self, worker_id: str) -> SimWorker | None:
        worker = self._by_id.get(worker_id)
        return worker if worker is not None and worker.alive else None

    def _ended(self, name: str, worker: SimWorker) -> None:
        self.agenda.after(self.rng.uniform(0.001, 0.2), lambda: self._take_for_dead(worker.worker_id))
        self.agenda.after(RESTART_S, lambda: self._start(name))

    def _frozen(self, name: str, worker: SimWorker, seconds: float) -> None:
        if seconds > SILENT_S:
            self.agenda.after(SILENT_S, lambda: self._take_for_dead(worker.worker_id))
            self.agenda.after(SILENT_S + self.rng.uniform(0.0, seconds), worker.crash)

    def _take_for_dead(self, worker_id: str) -> None:
        if worker_id not in self._gone:
            self._gone.add(worker_id)
            self._send_all(self.control.lost(worker_id, self.agenda.now_s))

    def _tick(self) -> None:
        self._send_all(self.control.tick(self.agenda.now_s))
        self.agenda.after(TICK_S, self._tick)

    # -- wires ------------------------------------------------------------------------------------------------------------------------

    def _send_all(self, effects: Effects) -> None:
        for worker_id, message in effects:
            self._to_worker(worker_id, message)

    def _to_worker(self, worker_id: str, message: wire.ToWorker) -> None:
        if isinstance(message, wire.Submit | wire.Adopt):
            self._check_epoch(message.record)
        if not self._travels(worker_id, message):
            return
        frame = encode(message)

        def arrive() -> None:
            worker = self._find(worker_id)
            if worker is not None and worker_id not in self._gone:
                worker.deliver(decode_to_worker(frame))

        self.agenda.after(self._delay(worker_id, message, True), arrive)

    def _from_worker(self, worker: SimWorker, message: wire.FromWorker) -> None:
        worker_id = worker.worker_id
        if not self._travels(worker_id, message):
            return
        frame = encode(message)

        def arrive() -> None:
            if worker_id not in self._gone:
                decoded = decode_from_worker(frame)
                self._send_all(self.control.on_message(worker_id, decoded, self.agenda.now_s))

        self.agenda.after(self._delay(worker_id, message, False), arrive)

    def _travels(self, worker_id: str, message: wire.ToWorker | wire.FromWorker) -> bool:
        if worker_id in self._gone:
            return False
        weather = self.faults.weather
        if _is_best_effort(message):
            return not weather.lose or self.rng.random() >= weather.lose
        if weather.cut and self.rng.random() < weather.cut:
            self._cut(worker_id)
            return False
        return True

    def _cut(self, worker_id: str) -> None:
        """The connection breaks; the worker goes on for a while, and nobody hears of it."""
        worker = self._find(worker_id)
        self.agenda.after(0.0, lambda: self._take_for_dead(worker_id))
        if worker is not None:
            self.agenda.after(self.rng.uniform(0.0, 1.0), worker.crash)

    def _delay(self, worker_id: str, message: wire.ToWorker | wire.FromWorker, to_worker: bool) -> float:
        """Time until a message is there, not before the one that was sent before it on the same link, unless it goes astray."""
        weather, key = self.faults.weather, (worker_id, to_worker)
        at_s = self.agenda.now_s + self.rng.uniform(*weather.delay_s)
        if weather.stray and _is_best_effort(message) and self.rng.random() < weather.stray:
            return at_s + self.rng.uniform(0.0, STRAY_S) - self.agenda.now_s
        self._wire_free_s[key] = at_s = max(at_s, self._wire_free_s.get(key, 0.0))
        return at_s - self.agenda.now_s

    def _check_epoch(self, record: SessionRecord) -> None:
        before = self._epochs.get(record.session_id, -1)
        if record.epoch <= before:
            self.broken.append(f"{record.session_id}: given away with epoch {record.epoch} after {before}")
        self._epochs[record.session_id] = record.epoch

    # -- traffic ----------------------------------------------------------------------------------------------------------------------

    def request(self, at_s: float, record: SessionRecord, *, cancel_s: float | None = None) -> None:
        """Send a request at ``at_s``, and perhaps cancel it so many seconds later."""
        self.requests[record.session_id] = record
        self.agenda.after(at_s - self.agenda.now_s, lambda: self._submit(record))
        if cancel_s is not None:
            self.agenda.after(at_s + cancel_s - self.agenda.now_s, lambda: self._cancel(record))

    def _submit(self, record: SessionRecord) -> None:
        try:
            self._send_all(self.control.submit(record, self.agenda.now_s))
        except KilatError as e:
            self.refused[record.session_id] = e

    def _cancel(self, record: SessionRecord) -> None:
        self.cancelled.add(record.session_id)
        self._send_all(self.control.cancel(record.session_id, record.params.n, self.agenda.now_s))

    def retire(self, at_s: float, name: str) -> None:
        """Ask at ``at_s`` that the sessions of a worker move elsewhere; it may be refused."""
        self.agenda.after(at_s - self.agenda.now_s, lambda: self._retire(name))

    def _retire(self, name: str) -> None:
        try:
            self._send_all(self.control.retire(self.workers[name].worker_id, self.agenda.now_s))
        except KilatError as e:
            self.refused[f"retire {name}"] = e

    # -- what must hold ---------------------------------------------------------------------------------------------------------------

    def settle(self, until_s: float) -> list[str]:
        """Run to ``until_s``, then on in calm weather until all deadlines are over; returns what is broken, nothing when all is well."""
        self.agenda.run(until_s)
        self.faults = Faults()
        self.agenda.run(until_s + SETTLE_S)
        self._check_ends()
        for name, worker in self.workers.items():
            if worker.alive and worker.worker_id not in self._gone:
                self._check_worker(name, worker)
        self.broken += self.control.leftovers()
        return self.broken

    def _check_ends(self) -> None:
        ends: dict[str, list[End]] = {}
        for branch, end in self.control.ends():
            ends.setdefault(branch, []).append(end)
        limit = self.shape.scheduler.max_session_tokens
        for session_id, record in self.requests.items():
            for k in range(record.params.n):
                got = ends.pop(branch_id(session_id, k), [])
                quiet = session_id in self.cancelled or session_id in self.refused
                if len(got) != 1 and not (quiet and not got):
                    self.broken.append(f"{branch_id(session_id, k)}: {len(got)} ends")
                wanted = expected(record, k, limit) if self.shape.content else None
                for end in got:
                    n = len(end.token_ids)
                    if wanted is not None and end.token_ids != (wanted if end.error is None else wanted[:n]):
                        self.broken.append(f"{branch_id(session_id, k)}: wrong tokens")
        self.broken += [f"{branch}: an end of nobody's sample" for branch in ends]

    def _check_worker(self, name: str, worker: SimWorker) -> None:
        try:
            worker.scheduler.check()
        except KilatError as e:
            self.broken.append(f"{name}: {e}")
        gauges = worker.scheduler.gauges()
        for gauge in (metrics.PAGES_USED, metrics.PAGES_PINNED, metrics.SESSIONS_WAITING):
            if gauges[gauge]:
                self.broken.append(f"{name}: {gauge} is {gauges[gauge]:.0f} when all is over")
        if worker.scheduler.has_work or worker.mover.is_busy:
            self.broken.append(f"{name}: still at work when all is over")
        if self.control.held_pages(worker.worker_id) != set(worker.scheduler.page_names()):
            self.broken.append(f"{name}: the index has not converged")
