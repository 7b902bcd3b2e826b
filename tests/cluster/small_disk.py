"""A disk that is full soon: a file system in memory of a given size."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NoSmallDisk(Exception):
    """This process may not mount anything; the text says what the system said."""


@contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[Path]:
    """A new folder ``folder`` that holds ``kib`` KiB. Raises NoSmallDisk."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "kilat-test", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.CalledProcessError) as e:
        raise NoSmallDisk(getattr(e, "stderr", None) or str(e)) from e
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True, timeout=20)
