"""Keeps workers alive: has them started, watches them, has them started again, and knows when to give up; and has as many as are needed."""

import asyncio
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kilat.base.errors import CapacityError, EngineError, KilatError, PeerError
from kilat.base.log import event, get_logger
from kilat.cluster.config import Place, ServeConfig
from kilat.cluster.gateway.errors import worker_died
from kilat.cluster.gateway.fleet import Fleet
from kilat.cluster.gateway.workers import WorkerState
from kilat.cluster.launchers.launcher import Handle, Launcher
from kilat.cluster.worker_config import EXIT_BAD_CONFIG, EXIT_START_FAILED, WorkerConfig
from kilat.policy.scale.headcount import Headcount

MAX_BACKOFF_S = 10.0
WATCH_S = 0.5
BLIND_S = 3.0
"""Of silence, after which a worker that its launcher cannot see either is taken for dead."""
STOP_GRACE_S = 3.0
POLL_S = 0.02

_log = get_logger("supervisor")


@dataclass(frozen=True, slots=True)
class Plant:
    """What all workers of a deployment are started with: who starts them, the shared secret, and how they read each other's pages."""

    config: ServeConfig
    fleet: Fleet
    launcher: Launcher
    secret: str
    transports: tuple[str, ...] = ()


class Supervisor:
    """Runs the worker of one place."""

    def __init__(self, plant: Plant, place: Place) -> None:
        self.place = place
        self._plant = plant
        self._deaths: deque[float] = deque()
        self._n_misses = 0
        self._handle: Handle | None = None
        self._worker: WorkerState | None = None
        self._stopping = asyncio.Event()
        self._retired: bool | None = None  # True: start a new one when it has ended

    @property
    def is_ready(self) -> bool:
        """Whether the worker has loaded, and runs."""
        w, handle = self._worker, self._handle
        return w is not None and w.hello is not None and handle is not None and not handle.ended

    async def run(self, on_restart: Callable[[], None]) -> None:
        """Returns when the worker has ended because it was asked to. Raises EngineError when it cannot be kept alive."""
        ever_ready = False
        while not self._stopping.is_set():
            started = await self._start()
            if started is None:
                continue
            handle, worker = started
            watcher = asyncio.create_task(self._watch(handle, worker))
            code = await handle.wait()
            watcher.cancel()
            ever_ready = ever_ready or worker.hello is not None
            reason = worker.fatal or _exit_words(code)
            self._plant.fleet.lost(worker.worker_id, worker_died(_exit_words(code)))
            if self._stopping.is_set():
                return
            if self._retired is not None:
                event(_log, "worker_drained", worker=self.place.name, pid=handle.pid, code=code)
                if not self._retired:
                    return
                self._retired = None
                continue
            event(_log, "worker_died", worker=self.place.name, pid=handle.pid, code=code, reason=repr(reason))
            # A first start that failed in building the engine fails the same way again.
            if code == EXIT_BAD_CONFIG or (code == EXIT_START_FAILED and not ever_ready):
                raise EngineError(reason)
            if await self._stopped_within(self._pause_s(reason)):
                return
            on_restart()

    async def _stopped_within(self, pause_s: float) -> bool:
        try:
            await asyncio.wait_for(self._stopping.wait(), pause_s)
        except TimeoutError:
            return False
        return True

    async def drain(self, again: bool, drain_s: float) -> int:
        """Let the worker's sessions move elsewhere, for at most ``drain_s`` seconds, and end it; returns how many it had. Raises
        CapacityError when no other worker could take them."""
        fleet, worker, handle = self._plant.fleet, self._worker, self._handle
        assert worker is not None and handle is not None
        n_sessions = fleet.dispatcher.n_sessions(worker.worker_id)
        fleet.retire(worker)
        event(_log, "worker_draining", worker=self.place.name, sessions=n_sessions)
        deadline_s = time.monotonic() + drain_s
        while not fleet.dispatcher.is_idle(worker.worker_id) and time.monotonic() < deadline_s:
            if handle.ended:
                return n_sessions  # it died meanwhile: run() knows what to do
            await asyncio.sleep(POLL_S)
        self._retired = again
        await self._end(handle, worker, 0.0)
        return n_sessions

    async def stop(self, drain_s: float) -> None:
        """End the worker for good: ask, then after ``drain_s`` and a little, kill. Idempotent."""
        self._stopping.set()
        if self._handle is not None and self._worker is not None:
            await self._end(self._handle, self._worker, drain_s)

    async def _end(self, handle: Handle, worker: WorkerState, drain_s: float) -> None:
        if handle.ended:
            return
        self._plant.fleet.ask_to_end(worker, drain_s)
        if worker.hello is None:  # still loading: it does not read its socket yet
            handle.terminate()
        deadline_s = time.monotonic() + drain_s + STOP_GRACE_S
        while not handle.ended and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)
        if not handle.ended:
            handle.kill()
            await handle.wait()

    async def _start(self) -> tuple[Handle, WorkerState] | None:
        """Have the worker started. None when that did not work this time, after a pause, or when this place is stopped. Raises
        EngineError when it never will."""
        plant, place = self._plant, self.place
        worker_id = f"{place.name}.{secrets.token_hex(8)}"
        worker = plant.fleet.expect(worker_id, place.name, (place.prefill_weight, place.decode_weight))
        starting = asyncio.ensure_future(plant.launcher.start(place, self._settings(worker_id)))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not starting.done():
                starting.cancel()
                await asyncio.wait((starting,))
        try:
            handle = starting.result()
        except (asyncio.CancelledError, PeerError, EngineError) as e:
            plant.fleet.lost(worker_id, worker_died("was not started"))
            if isinstance(e, asyncio.CancelledError):
                return None
            event(_log, "worker_not_started", worker=place.name, reason=repr(str(e)))
            if isinstance(e, EngineError):
                raise
            # Nothing died, so this is no reason to give up.
            pause_s = min(plant.config.backoff_s * 2**self._n_misses, MAX_BACKOFF_S)
            self._n_misses += pause_s < MAX_BACKOFF_S
            await self._stopped_within(pause_s)
            return None
        self._n_misses = 0
        event(
            _log,
            "worker_started",
            pid=handle.pid,
            worker=worker_id,
            cores=_ranges(place.cores),
            host=handle.host or "here",
        )
        self._handle, self._worker = handle, worker
        if self._stopping.is_set():  # stop() came too early to see it
            await self._end(handle, worker, 0.0)
        return handle, worker

    def _settings(self, worker_id: str) -> WorkerConfig:
        plant, c = self._plant, self._plant.config
        share = 1e9 / max(c.n_workers, c.max_workers)
        return WorkerConfig(
            address=plant.fleet.links.address,
            secret=plant.secret,
            worker_id=worker_id,
            engine=msgspec.Raw(msgspec.json.encode(plant.config.engine)),
            status_interval_s=plant.config.status_interval_s,
            drain_s=plant.config.drain_s,
            transports=plant.transports,
            host_cache_bytes=int(c.host_cache_gb * share),
            disk_cache_bytes=int(c.disk_cache_gb * share),
            disk_cache_dir=str(Path(c.disk_cache_dir) / self.place.name),
        )

    async def _watch(self, handle: Handle, worker: WorkerState) -> None:
        """Kill a worker that was ready once and then fell silent, or whose step does not end."""
        c = self._plant.config
        while True:
            await asyncio.sleep(WATCH_S)
            silent_s, age_s = self._plant.fleet.silent_s(worker), worker.step_age_s
            if handle.blind and silent_s > max(BLIND_S, 4 * c.status_interval_s):
                worker.fatal = f"lost: silent for {silent_s:.1f} s, and its host cannot be asked"
                handle.kill()
                return
            if worker.hello is None:
                continue
            if silent_s > c.worker_timeout_s or age_s > c.step_timeout_s:
                worker.fatal = f"silent for {silent_s:.1f} s, in one step for {age_s:.1f} s: killed"
                handle.kill()
                return

    def _pause_s(self, reason: str) -> float:
        """How long to wait before the next start. Raises EngineError when there were too many deaths lately."""
        c = self._plant.config
        now_s = time.monotonic()
        self._deaths.append(now_s)
        while self._deaths[0] < now_s - c.failure_window_s:
            self._deaths.popleft()
        if len(self._deaths) >= c.max_failures:
            raise EngineError(
                f"the worker died {len(self._deaths)} times within {c.failure_window_s:g} s, the last time: {reason}"
            )
        return min(c.backoff_s * 2 ** (len(self._deaths) - 1), MAX_BACKOFF_S)


class Crew:
    """All workers of a deployment, each kept alive by a supervisor of its own. ``places``: the first ``n_workers`` of the configuration get
    theirs at once, the others while more are wished for."""

    def __init__(self, plant: Plant, places: Sequence[Place]) -> None:
        self._plant = plant
        self._places = list(places)
        self._running: dict[asyncio.Task[None], Supervisor] = {}
        self._ended: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[int]] = set()
        self._leaving: set[Supervisor] = set()
        self._on_restart: Callable[[], None] = lambda: None
        self._stopping = False
        scale = plant.config.scale
        self._headcount = Headcount(scale) if scale is not None and plant.config.max_workers else None

    async def run(self, on_restart: Callable[[], None]) -> None:
        """Returns when all workers have ended because they were asked to. Raises the last error when no worker can be kept alive."""
        self._on_restart = on_restart
        self._add(self._plant.config.n_workers)
        last = None
        while self._running:
            task = await self._ended.get()
            place, error = self._running.pop(task).place, task.exception()
            if error is None:
                continue
            if not isinstance(error, KilatError):
                raise error
            last = error
            self._places.remove(place)  # nobody else is to try it
            self._plant.fleet.workers.settle()
            if self._running:
                event(_log, "worker_given_up", worker=place.name, reason=repr(str(error)))
        if last is not None and not self._stopping:
            raise last

    def wish(self, wished: int) -> None:
        """Have so many workers, soon; 0 when nobody knows. To be called every now and then, from the event loop."""
        if self._headcount is None or self._stopping:
            return
        there = [s for s in self._running.values() if s not in self._leaving]
        change = self._headcount.on_wish(wished, len(there), time.monotonic())
        if change > 0:
            event(_log, "workers_added", workers=self._add(change), wished=wished)
        elif change < 0 and not self._leaving:
            event(_log, "worker_not_needed", worker=there[-1].place.name, wished=wished)
            self._in_background(self._let_go(there[-1]))

    async def _let_go(self, supervisor: Supervisor) -> int:
        """End a worker that is not needed: the youngest, which has had the least time to fill its pages."""
        try:
            return await self._drain(supervisor, again=False)
        except CapacityError as e:
            event(_log, "worker_stays", worker=supervisor.place.name, reason=repr(str(e)))
            return 0

    def _add(self, n: int) -> int:
        """Start workers in the first free places, at most ``n``; returns how many."""
        taken = [s.place for s in self._running.values()]
        free = [place for place in self._places if place not in taken][:n]
        for place in free:
            supervisor = Supervisor(self._plant, place)
            task = asyncio.create_task(supervisor.run(self._on_restart))
            self._running[task] = supervisor
            task.add_done_callback(self._ended.put_nowait)
        return len(free)

    async def drain(self, worker: WorkerState, again: bool) -> int:
        """Take a worker out of service; see :meth:`Supervisor.drain`. Goes on when the caller is cancelled."""
        supervisor = next(s for s in self._running.values() if s.place.name == worker.name)
        return await asyncio.shield(self._in_background(self._drain(supervisor, again)))

    async def _drain(self, supervisor: Supervisor, again: bool) -> int:
        if not again:
            self._leaving.add(supervisor)
        try:
            if supervisor.is_ready:
                return await supervisor.drain(again, self._plant.config.drain_s)
            await supervisor.stop(0.0)
            return 0
        finally:
            self._leaving.discard(supervisor)

    def _in_background(self, work: Coroutine[None, None, int]) -> "asyncio.Task[int]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self, drain_s: float) -> None:
        """End all workers for good. Idempotent."""
        self._stopping = True
        await asyncio.gather(*(s.stop(drain_s) for s in self._running.values()))


def _exit_words(code: int | None) -> str:
    if code is None:
        return "was lost"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"


def _ranges(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores)) or "all"
