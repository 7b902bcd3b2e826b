"""Workers that are processes of this host, children of this one."""

import asyncio
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kilat.base.env import child_environment
from kilat.cluster.config import Place
from kilat.cluster.worker_config import WorkerConfig, write_config


class LocalHandle:
    """See :class:`kilat.cluster.launchers.launcher.Handle`. A thread of its own waits, for a shared one may be taken."""

    host = ""
    blind = False

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._code: asyncio.Future[int] = self._loop.create_future()
        self.pid = process.pid
        threading.Thread(target=self._wait, name=f"wait-{process.pid}", daemon=True).start()

    @property
    def ended(self) -> bool:
        return self._code.done()

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def _wait(self) -> None:
        code = self._process.wait()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._code.set_result, code)


class LocalLauncher:
    """Starts ``command CONFIG``; ``folder`` is where the configuration is put, from which the worker takes it away."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command = command
        self._folder = folder

    async def start(self, place: Place, config: WorkerConfig) -> LocalHandle:
        path = self._folder / f"{config.worker_id}.json"
        write_config(path, msgspec.structs.replace(config, parent_pid=os.getpid()))
        # A session of its own: Ctrl-C in the terminal is for the gateway. Standard output is the gateway's alone.
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(place.devices)} if place.devices else {}
        process = subprocess.Popen(
            [*self._command, str(path)],
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
            env=child_environment(**devices),
        )
        if place.cores and hasattr(os, "sched_setaffinity"):
            # It has one thread yet, and those that it starts inherit its cores.
            os.sched_setaffinity(process.pid, place.cores)
        return LocalHandle(process)

    async def close(self) -> None:
        """Nothing is left to close."""
