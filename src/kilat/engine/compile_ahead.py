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
        n = max(1, min(MOST_PROCESSES, len(os.sched_getaffinity(0)) // 2))
        command = [sys.executable, "-m", "kilat.engine.compile_main", msgspec.json.encode(config).decode()]
        self._running = [
            subprocess.Popen(
                [*command, str(i), str(n)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=child_environment(),
            )
            for i in range(n)
        ]

    @property
    def done(self) -> bool:
        """Whether all have ended; one that failed only means that the engine compiles what it did not."""
        for process in list(self._running):
            if process.poll() is not None:
                self._running.remove(process)
                event(_log, "compiled_ahead", exit_code=process.returncode, left=len(self._running))
        return not self._running

    def close(self) -> None:
        """End what still runs."""
        for process in self._running:
            process.kill()
            process.wait()
        self._running.clear()
