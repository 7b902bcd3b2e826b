"""Keeps one worker process alive: starts it, watches it, starts it again, and knows when to give up."""

import asyncio
import os
import secrets
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kilat.base import metrics as names
from kilat.base.errors import EngineError
from kilat.base.log import event, get_logger
from kilat.cluster.config import ServeConfig
from kilat.cluster.gateway.errors import worker_died
from kilat.cluster.gateway.link import WorkerLink
from kilat.cluster.worker_config import EXIT_BAD_CONFIG, EXIT_START_FAILED, WorkerConfig, write_config

MAX_BACKOFF_S = 10.0
WATCH_S = 0.5
STOP_GRACE_S = 3.0

_log = get_logger("supervisor")


class Supervisor:
    """Runs ``command CONFIG`` as the worker behind ``link``."""

    def __init__(
        self, config: ServeConfig, link: WorkerLink, command: Sequence[str], folder: Path, secret: str
    ) -> None:
        self._config = config
        self._link = link
        self._command = command
        self._folder = folder
        self._secret = secret
        self._deaths: deque[float] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = asyncio.Event()

    async def run(self, on_restart: Callable[[], None]) -> None:
        """Returns when the worker has ended because :meth:`stop` was called. Raises EngineError when it cannot be kept alive."""
        ever_ready = False
        while not self._stopping.is_set():
            process = self._spawn()
            watcher = asyncio.create_task(self._watch(process))
            code = await asyncio.get_running_loop().run_in_executor(None, process.wait)
            watcher.cancel()
            ever_ready = ever_ready or self._link.hello is not None
            reason = self._link.fatal or _exit_words(code)
            self._link.lost(worker_died(_exit_words(code)))
            if self._stopping.is_set():
                return
            event(_log, "worker_died", pid=process.pid, code=code, reason=repr(reason))
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

    async def stop(self, drain_s: float) -> None:
        """End the worker: ask, then after ``drain_s`` and a little, kill. Idempotent."""
        self._stopping.set()
        process = self._process
        if process is None or process.poll() is not None:
            return
        self._link.drain(drain_s)
        if self._link.hello is None:  # still loading: it does not read its socket yet
            process.terminate()
        deadline_s = time.monotonic() + drain_s + STOP_GRACE_S
        while process.poll() is None and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        if process.poll() is None:
            process.kill()
            process.wait()

    def _spawn(self) -> subprocess.Popen[bytes]:
        worker_id = f"worker-{secrets.token_hex(8)}"
        path = self._folder / f"{worker_id}.json"
        settings = WorkerConfig(
            address=self._link.address,
            secret=self._secret,
            worker_id=worker_id,
            parent_pid=os.getpid(),
            engine=msgspec.Raw(msgspec.json.encode(self._config.engine)),
            status_interval_s=self._config.status_interval_s,
            drain_s=self._config.drain_s,
        )
        write_config(path, settings)
        self._link.expect(worker_id)
        # A session of its own: Ctrl-C in the terminal is for the gateway. Standard output is the gateway's alone.
        self._process = subprocess.Popen(
            [*self._command, str(path)], stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
        )
        event(_log, "worker_started", pid=self._process.pid, worker=worker_id)
        return self._process

    async def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a worker that was ready once and then fell silent, or whose step does not end."""
        c = self._config
        while True:
            await asyncio.sleep(WATCH_S)
            if self._link.hello is None:
                continue
            silent_s = time.monotonic() - self._link.heard_at_s
            status = self._link.status
            age_s = status.gauges.get(names.STEP_AGE, 0.0) if status is not None else 0.0
            if silent_s > c.worker_timeout_s or age_s > c.step_timeout_s:
                self._link.fatal = f"silent for {silent_s:.1f} s, in one step for {age_s:.1f} s: killed"
                process.send_signal(signal.SIGKILL)
                return

    def _pause_s(self, reason: str) -> float:
        """How long to wait before the next start. Raises EngineError when there were too many deaths lately."""
        c = self._config
        now_s = time.monotonic()
        self._deaths.append(now_s)
        while self._deaths[0] < now_s - c.failure_window_s:
            self._deaths.popleft()
        if len(self._deaths) >= c.max_failures:
            raise EngineError(
                f"the worker died {len(self._deaths)} times within {c.failure_window_s:g} s, the last time: {reason}"
            )
        return min(c.backoff_s * 2 ** (len(self._deaths) - 1), MAX_BACKOFF_S)


def _exit_words(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"
