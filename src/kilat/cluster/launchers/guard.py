"""``python -m kilat.cluster.launchers.guard FOLDER COMMAND...``: runs one worker, apart from whoever asked for it.

It leaves its parent, so that a worker outlives whatever placed it on this host, and is itself what the worker does not outlive. ``FOLDER``
holds the worker's configuration (:data:`CONFIG`); it gets the process ids of guard and worker (:data:`PIDS`), and at the end the exit code
(:data:`CODE`). Whoever reads that removes the folder; if nobody does, the guard does.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kilat.cluster.worker_config import take_config, write_config

CONFIG, OWN, PIDS, CODE = "config.json", "worker.json", "pids", "code"
KEEP_S, POLL_S = 60.0, 0.5


def guard(folder: Path, command: Sequence[str]) -> None:
    """Returns at once in the caller's process; the guard goes on in one that has left it."""
    if os.fork():
        return
    os.setsid()
    config = msgspec.structs.replace(take_config(folder / CONFIG), parent_pid=os.getpid())
    write_config(folder / OWN, config)
    worker = subprocess.Popen(
        [*command, str(folder / OWN)], stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
    )
    _tell(folder / PIDS, f"{os.getpid()} {worker.pid}")
    _tell(folder / CODE, str(worker.wait()))
    until_s = time.monotonic() + KEEP_S
    while folder.exists() and time.monotonic() < until_s:
        time.sleep(POLL_S)
    shutil.rmtree(folder, ignore_errors=True)


def _tell(path: Path, text: str) -> None:
    """Readers see all of it or nothing."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


if __name__ == "__main__":
    guard(Path(sys.argv[1]), sys.argv[2:])
