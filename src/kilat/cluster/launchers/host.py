"""WorkerHost: what an actor on some host does for one worker there. Knows nothing of Ray."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kilat.cluster.launchers.guard import CODE, CONFIG, PIDS

START_S = 30.0
POLL_S = 0.05


class WorkerHost:
    """Starts one worker, or finds one again that an earlier host has started. Methods may be called from several threads."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def start(self, command: Sequence[str], config: bytes) -> tuple[int, str]:
        """Run ``python COMMAND CONFIG`` behind a guard; returns the process id and what :meth:`find` needs. ``config`` is a WorkerConfig in
        JSON. Raises OSError, TimeoutExpired."""
        folder = Path(
            tempfile.mkdtemp(prefix="kilat-")
        )  # only its owner may look into it, for it holds a secret
        (folder / CONFIG).write_bytes(config)
        guard = [sys.executable, "-m", "kilat.cluster.launchers.guard", str(folder), sys.executable, *command]
        subprocess.run(guard, stdin=subprocess.DEVNULL, stdout=2, timeout=START_S, check=True)
        deadline_s = time.monotonic() + START_S
        while not (folder / PIDS).exists():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the worker's guard did not start it within {START_S:g} s")
            time.sleep(POLL_S)
        self._folder = folder
        return self._pids()[1], str(folder)

    def find(self, folder: str, pid: int) -> bool:
        """Take over the worker with this process id that was started here before; False when it is not known on this host."""
        self._folder = Path(folder)
        with suppress(OSError, ValueError):
            return self._pids()[1] == pid
        return False

    def wait(self) -> int:
        """Its exit code, negative for a signal."""
        assert self._folder is not None
        guard, _ = self._pids()
        while not (self._folder / CODE).exists():
            if not _runs(guard) and not (self._folder / CODE).exists():
                return -signal.SIGKILL  # the system kills a worker whose guard has died
            time.sleep(POLL_S)
        code = int((self._folder / CODE).read_text())
        shutil.rmtree(self._folder, ignore_errors=True)
        return code

    def signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        with suppress(OSError, ValueError):
            guard, worker = self._pids()
            if _runs(guard):  # and has not reaped it, so the id is still this worker's
                os.kill(worker, number)

    def _pids(self) -> tuple[int, int]:
        assert self._folder is not None
        guard, worker = (self._folder / PIDS).read_text().split()
        return int(guard), int(worker)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
