"""Workers on the hosts of a Ray cluster, one actor each. Ray places them and reports their end; what they do does not depend on it."""

import asyncio
import importlib.util
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

import msgspec

from kilat.base.env import child_environment
from kilat.base.errors import ConfigError, EngineError, KilatError, PeerError
from kilat.base.log import event, get_logger
from kilat.cluster.config import LOOPBACK, Place, ServeConfig
from kilat.cluster.launchers.ray_wire import (
    Down,
    Exited,
    Failed,
    Find,
    FromDriver,
    Lost,
    Setup,
    Signal,
    Start,
    Started,
    ToDriver,
    Up,
    from_driver,
    line,
)
from kilat.cluster.worker_config import WorkerConfig

DRIVER = (sys.executable, "-m", "kilat.cluster.launchers.ray_driver")
FIND_S = 2.0
KILL_S = 2.0
CLOSE_S = 10.0
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.5, 10.0

_log = get_logger("ray")


class RayHandle:
    """See :class:`kilat.cluster.launchers.launcher.Handle`. Blind while its actor, or all of Ray, is gone."""

    def __init__(self, launcher: "RayLauncher", place: int, started: Started) -> None:
        self.key = started.key
        self.pid = started.pid
        self.host = started.host
        self.folder = started.folder
        self.place = place
        self.blind = False
        self._launcher = launcher
        self._code: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    @property
    def ended(self) -> bool:
        return self._code.done()

    async def wait(self) -> int | None:
        return await asyncio.shield(self._code)

    def terminate(self) -> None:
        self._launcher.send(Signal(self.key, signal.SIGTERM))

    def kill(self) -> None:
        self._launcher.send(Signal(self.key, signal.SIGKILL))
        asyncio.get_running_loop().call_later(0.0 if self.blind else KILL_S, self.end, None)

    def end(self, code: int | None) -> None:
        """It has ended. Idempotent: the first one counts."""
        if not self._code.done():
            self._code.set_result(code)
            self._launcher.forget(self)


class RayLauncher:
    """Has one driver process, which is started again when it dies. ``command`` is what Python runs on the other host."""

    def __init__(
        self,
        config: ServeConfig,
        command: Sequence[str],
        places: Sequence[Place],
        *,
        driver: Sequence[str] = DRIVER,
    ) -> None:
        assert config.ray is not None
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("Ray is not installed here: pip install 'kilat[ray]'")
        one_host = config.ray.control_host in LOOPBACK
        self._setup = Setup(config.ray.address, config.n_workers, config.ray.cpus, config.ray.gpus, one_host)
        self._command = list(command)
        self._driver_command = driver
        self._numbers = {place.name: i for i, place in enumerate(places)}
        self._handles: dict[str, RayHandle] = {}
        self._starts: dict[str, asyncio.Future[RayHandle]] = {}
        self._driver: Process | None = None
        self._up: asyncio.Future[None] | None = None
        self._was_up = False
        self._task: asyncio.Task[None] | None = None

    async def start(self, place: Place, config: WorkerConfig) -> RayHandle:
        if self._task is None:
            self._up = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run())
        assert self._up is not None
        await asyncio.shield(self._up)
        key = config.worker_id
        self._starts[key] = asyncio.get_running_loop().create_future()
        settings = msgspec.Raw(msgspec.json.encode(config))
        self.send(Start(key, self._numbers[place.name], self._command, settings))
        try:
            return await self._starts[key]
        except asyncio.CancelledError:
            self.send(Signal(key, signal.SIGKILL))
            raise
        finally:
            del self._starts[key]

    async def close(self) -> None:
        if self._task is None:
            return
        driver = self._driver
        self._task.cancel()  # its end closes the driver's standard input
        if driver is None:
            return
        try:
            await asyncio.wait_for(driver.wait(), CLOSE_S)
        except TimeoutError:
            driver.kill()
            await driver.wait()

    def send(self, message: ToDriver) -> None:
        """Tell the driver, if it is there."""
        if self._driver is not None and self._driver.stdin is not None:
            self._driver.stdin.write(line(message))

    def forget(self, handle: RayHandle) -> None:
        """This worker has ended."""
        self._handles.pop(handle.key, None)

    async def _run(self) -> None:
        """Keep a driver running. Ends when Ray could never be reached."""
        pause_s = MIN_BACKOFF_S
        while True:
            why = await self._drive()
            if not self._was_up:
                self._fail(EngineError(f"Ray at {self._setup.address!r} cannot be used: {why}"))
                return
            pause_s = (
                MIN_BACKOFF_S if self._up is not None and self._up.done() else min(2 * pause_s, MAX_BACKOFF_S)
            )
            self._fail(PeerError(f"Ray cannot be reached: {why}"))
            event(_log, "ray_lost", reason=repr(why), workers=len(self._handles))
            for handle in self._handles.values():
                handle.blind = True
            await asyncio.sleep(pause_s)
            self._up = asyncio.get_running_loop().create_future()

    async def _drive(self) -> str:
        """The life of one driver; returns why it ended."""
        env = child_environment(RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0", RAY_COLOR_PREFIX="0")
        # A session of its own: Ctrl-C in the terminal is for the gateway.
        driver = await asyncio.create_subprocess_exec(
            *self._driver_command, stdin=PIPE, stdout=PIPE, env=env, start_new_session=True
        )
        self._driver, why = driver, ""
        self.send(self._setup)
        assert driver.stdout is not None
        try:
            while text := await driver.stdout.readline():
                message = from_driver.decode(text)
                if isinstance(message, Down):
                    why = message.why
                else:
                    self._on_message(message)
            code = await driver.wait()
            return why or f"its driver ended with status {code}"
        finally:
            self._driver = None
            if driver.stdin is not None:
                driver.stdin.close()

    def _fail(self, error: KilatError) -> None:
        """Whoever waits for the driver, or will before there is a new one, gets this."""
        assert self._up is not None
        if self._up.done():
            self._up = asyncio.get_running_loop().create_future()
        self._up.set_exception(error)
        self._up.exception()  # it is not lost when nobody waits
        for waiting in self._starts.values():
            if not waiting.done():
                waiting.set_exception(error)

    def _on_message(self, message: FromDriver) -> None:
        if isinstance(message, Up):
            self._on_up()
        elif isinstance(message, Started):
            self._on_started(message)
        elif isinstance(message, Failed):
            self._on_failed(message)
        elif isinstance(message, Exited | Lost) and (handle := self._handles.get(message.key)):
            if isinstance(message, Exited):
                handle.end(message.code)
            else:
                event(_log, "actor_lost", worker=message.key, reason=repr(message.why))
                handle.blind = True
                self._find(handle)

    def _on_up(self) -> None:
        assert self._up is not None
        self._was_up = True
        self._up.set_result(None)
        for handle in self._handles.values():
            self._find(handle)

    def _on_started(self, message: Started) -> None:
        waiting, handle = self._starts.get(message.key), self._handles.get(message.key)
        if waiting is not None and not waiting.done():
            # Known from now on: the news of its end may be right behind.
            place = self._numbers[message.key.rpartition(".")[0]]
            started = self._handles[message.key] = RayHandle(self, place, message)
            waiting.set_result(started)
        elif handle is not None:
            event(_log, "worker_found", worker=message.key, pid=handle.pid)
            handle.blind = False
        else:
            self.send(Signal(message.key, signal.SIGKILL))  # nobody waits for it any more

    def _on_failed(self, message: Failed) -> None:
        waiting, handle = self._starts.get(message.key), self._handles.get(message.key)
        if waiting is not None and not waiting.done():
            waiting.set_exception(EngineError(message.why) if message.final else PeerError(message.why))
        elif handle is not None:
            handle.blind = True
            asyncio.get_running_loop().call_later(FIND_S, self._find, handle)

    def _find(self, handle: RayHandle) -> None:
        """See it again, if it still runs."""
        if handle.blind and not handle.ended:
            self.send(Find(handle.key, handle.place, handle.folder, handle.pid))
