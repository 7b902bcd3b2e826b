"""Keeps worker processes alive: starts them, watches them, starts them again, and knows when to give up."""

import asyncio
import os
import secrets
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kilat.base.errors import EngineError, KilatError
from kilat.base.log import event, get_logger
from kilat.cluster.config import Place, ServeConfig
from kilat.cluster.gateway.errors import worker_died
from kilat.cluster.gateway.fleet import Fleet
from kilat.cluster.gateway.workers import WorkerState
from kilat.cluster.worker_config import EXIT_BAD_CONFIG, EXIT_START_FAILED, WorkerConfig, write_config

MAX_BACKOFF_S = 10.0
WATCH_S = 0.5
STOP_GRACE_S = 3.0
POLL_S = 0.02

_log = get_logger("supervisor")


@dataclass(frozen=True, slots=True)
class Plant:
    """What all workers of a deployment are started with: ``command CONFIG``, the folder for the configuration, the shared secret, and
    how they read each other's pages."""

    config: ServeConfig
    fleet: Fleet
    command: Sequence[str]
    folder: Path
    secret: str
    transports: tuple[str, ...] = ()


class Supervisor:
    """Runs the worker of one place."""

    def __init__(self, plant: Plant, place: Place) -> None:
        self.place = place
        self._plant = plant
        self._deaths: deque[float] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._worker: WorkerState | None = None
        self._stopping = asyncio.Event()
        self._retired: bool | None = None  # True: start a new one when it has ended

    async def run(self, on_restart: Callable[[], None]) -> None:
        """Returns when the worker has ended because it was asked to. Raises EngineError when it cannot be kept alive."""
        ever_ready = False
        while not self._stopping.is_set():
            process, worker = self._spawn()
            watcher = asyncio.create_task(self._watch(process, worker))
            code = await asyncio.get_running_loop().run_in_executor(None, process.wait)
            watcher.cancel()
            ever_ready = ever_ready or worker.hello is not None
            reason = worker.fatal or _exit_words(code)
            self._plant.fleet.lost(worker.worker_id, worker_died(_exit_words(code)))
            if self._stopping.is_set():
                return
            if self._retired is not None:
                event(_log, "worker_drained", worker=self.place.name, pid=process.pid, code=code)
                if not self._retired:
                    return
                self._retired = None
                continue
            event(
                _log, "worker_died", worker=self.place.name, pid=process.pid, code=code, reason=repr(reason)
            )
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
        fleet, worker, process = self._plant.fleet, self._worker, self._process
        assert worker is not None and process is not None
        n_sessions = fleet.dispatcher.n_sessions(worker.worker_id)
        fleet.retire(worker)
        event(_log, "worker_draining", worker=self.place.name, sessions=n_sessions)
        deadline_s = time.monotonic() + drain_s
        while not fleet.dispatcher.is_idle(worker.worker_id) and time.monotonic() < deadline_s:
            if process.poll() is not None:
                return n_sessions  # it died meanwhile: run() knows what to do
            await asyncio.sleep(POLL_S)
        self._retired = again
        await self._end(process, worker, 0.0)
        return n_sessions

    async def stop(self, drain_s: float) -> None:
        """End the worker for good: ask, then after ``drain_s`` and a little, kill. Idempotent."""
        self._stopping.set()
        if self._process is not None and self._worker is not None:
            await self._end(self._process, self._worker, drain_s)

    async def _end(self, process: "subprocess.Popen[bytes]", worker: WorkerState, drain_s: float) -> None:
        if process.poll() is not None:
            return
        self._plant.fleet.ask_to_end(worker, drain_s)
        if worker.hello is None:  # still loading: it does not read its socket yet
            process.terminate()
        deadline_s = time.monotonic() + drain_s + STOP_GRACE_S
        while process.poll() is None and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)
        if process.poll() is None:
            process.kill()
            process.wait()

    def _spawn(self) -> "tuple[subprocess.Popen[bytes], WorkerState]":
        plant, place = self._plant, self.place
        worker_id = f"{place.name}.{secrets.token_hex(8)}"
        path = plant.folder / f"{worker_id}.json"
        settings = WorkerConfig(
            address=plant.fleet.links.address,
            secret=plant.secret,
            worker_id=worker_id,
            parent_pid=os.getpid(),
            engine=msgspec.Raw(msgspec.json.encode(plant.config.engine)),
            status_interval_s=plant.config.status_interval_s,
            drain_s=plant.config.drain_s,
            transports=plant.transports,
        )
        write_config(path, settings)
        worker = plant.fleet.expect(worker_id, place.name, (place.prefill_weight, place.decode_weight))
        # A session of its own: Ctrl-C in the terminal is for the gateway. Standard output is the gateway's alone.
        process = subprocess.Popen(
            [*plant.command, str(path)], stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
        )
        if place.cores and hasattr(os, "sched_setaffinity"):
            # It has one thread yet, and those that it starts inherit its cores.
            os.sched_setaffinity(process.pid, place.cores)
        event(_log, "worker_started", pid=process.pid, worker=worker_id, cores=_ranges(place.cores))
        self._process, self._worker = process, worker
        return process, worker

    async def _watch(self, process: "subprocess.Popen[bytes]", worker: WorkerState) -> None:
        """Kill a worker that was ready once and then fell silent, or whose step does not end."""
        c = self._plant.config
        while True:
            await asyncio.sleep(WATCH_S)
            if worker.hello is None:
                continue
            silent_s, age_s = self._plant.fleet.silent_s(worker), worker.step_age_s
            if silent_s > c.worker_timeout_s or age_s > c.step_timeout_s:
                worker.fatal = f"silent for {silent_s:.1f} s, in one step for {age_s:.1f} s: killed"
                process.send_signal(signal.SIGKILL)
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
    """All workers of a deployment, each kept alive by a supervisor of its own."""

    def __init__(self, plant: Plant, places: Sequence[Place]) -> None:
        self._plant = plant
        self._supervisors = [Supervisor(plant, place) for place in places]
        self._drains: set[asyncio.Task[int]] = set()
        self._stopping = False

    async def run(self, on_restart: Callable[[], None]) -> None:
        """Returns when all workers have ended because they were asked to. Raises the last error when no worker can be kept alive."""
        tasks = {asyncio.create_task(s.run(on_restart)): s for s in self._supervisors}
        pending, last = set(tasks), None
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is None:
                    continue
                if not isinstance(error, KilatError):
                    raise error
                last = error
                self._plant.fleet.workers.settle()
                if pending:
                    event(_log, "worker_given_up", worker=tasks[task].place.name, reason=repr(str(error)))
        if last is not None and not self._stopping:
            raise last

    async def drain(self, worker: WorkerState, again: bool) -> int:
        """Take a worker out of service; see :meth:`Supervisor.drain`. Goes on when the caller is cancelled."""
        supervisor = next(s for s in self._supervisors if s.place.name == worker.name)
        task = asyncio.create_task(supervisor.drain(again, self._plant.config.drain_s))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)
        return await asyncio.shield(task)

    async def stop(self, drain_s: float) -> None:
        """End all workers for good. Idempotent."""
        self._stopping = True
        await asyncio.gather(*(s.stop(drain_s) for s in self._supervisors))


def _exit_words(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"


def _ranges(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores)) or "all"
