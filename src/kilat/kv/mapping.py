"""Memory files of another process of this host, mapped through ``/proc``."""

import fcntl
import mmap
import os
from pathlib import Path


def host_id() -> str:
    """The boot of this machine and the space of its process ids: two processes with the same answer can map each other's memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def map_file(pid: int, fd: int, size: int, *, inode: int | None = None) -> mmap.mmap:
    """Map another process's file, read only. Raises OSError or ValueError when it is not the one that is meant.

    A file that can shrink under its readers would kill them (SIGBUS), so it has to be sealed against that.
    """
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        stat = os.fstat(own)
        if stat.st_size < size or (inode is not None and stat.st_ino != inode):
            raise ValueError("another file than the one that was offered")
        if not fcntl.fcntl(own, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("the memory is not sealed against shrinking")
        return mmap.mmap(own, size, prot=mmap.PROT_READ)
    finally:
        os.close(own)
