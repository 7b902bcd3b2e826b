"""Compiles the kernels of likely steps in processes of their own, while the engine answers already.

On a machine that has not run a model yet, the first step of a shape would otherwise stand still for up to some seconds. The processes
hold no weights and no memory of the device: their model has one layer of each kind on torch's meta device, and what they compile goes to
the machine's cache, from which the engine takes it.
"""

import os
import subprocess
import sys

import msgspec

from kilat.base.env import child_environment
from kilat.base.log import event, get_logger
from kilat.engine.config import EngineConfig

MOST_PROCESSES = 4

_log = get_logger("engine")


class CompileAhead:
    """The processes; they end by themselves, and with the process that started them."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._running: list[subprocess.Popen] | None = None

    def start(self) -> None:
        """Start them, if that is still to be done: behind the first step, which they would slow down."""
        if self._running is not None:
            return
        n = max(1, min(MOST_PROCESSES, len(os.sched_getaffinity(0)) // 2))
        config = msgspec.json.encode(self._config).decode()
        self._running = []
        try:
            for i in range(n):
                command = [sys.executable, "-m", "kilat.engine.compile_main", config, str(i), str(n)]
                quiet = subprocess.DEVNULL
                self._running.append(
                    subprocess.Popen(command, stdin=quiet, stdout=quiet, env=child_environment())
                )
        except OSError as e:  # a machine without room for processes: what they do not compile the engine does
            event(_log, "not_compiled_ahead", reason=str(e), started=len(self._running), of=n)

    @property
    def done(self) -> bool:
        """Whether all were started and have ended; one that failed only means that the engine compiles what it did not."""
        for process in list(self._running or ()):
            if process.poll() is not None:
                self._running = [p for p in self._running or () if p is not process]
                event(_log, "compiled_ahead", exit_code=process.returncode, left=len(self._running))
        return self._running == []

    def close(self) -> None:
        """End what still runs, and start nothing any more."""
        for process in self._running or ():
            process.kill()
            process.wait()
        self._running = []
