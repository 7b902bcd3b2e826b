"""What this machine is: CPU, instruction sets, cores, memory. Read from /proc and the scheduler; no torch."""

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import kilat

# what the kernels and libraries care for, in rising order
ISA_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "bf16",
    "i8mm",
)


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts of now. ``cores``: logical processors that this process may use. ``memory_bytes``: of the machine
    or of the cgroup limit, the smaller; ``free_bytes``: what of it can still be used without swapping.
    """

    cpu: str
    isa: tuple[str, ...]
    cores: int
    memory_bytes: int
    free_bytes: int


def read_machine() -> Machine:
    """Look at the machine; what cannot be found out is 0 or ``unknown``."""
    cpuinfo = _fields(Path("/proc/cpuinfo"))
    flags = (cpuinfo.get("flags") or cpuinfo.get("Features") or "").split()
    memory = {
        k: int(v.split()[0]) * 1024 for k, v in _fields(Path("/proc/meminfo")).items() if v.endswith("kB")
    }
    total, free = memory.get("MemTotal", 0), memory.get("MemAvailable", 0)
    limit, used = _number(Path("/sys/fs/cgroup/memory.max")), _number(Path("/sys/fs/cgroup/memory.current"))
    if limit is not None and limit < total:
        total, free = limit, min(free, max(limit - (used or 0), 0))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
    cpu = cpuinfo.get("model name") or platform.processor() or platform.machine() or "unknown"
    return Machine(cpu, tuple(f for f in ISA_FLAGS if f in flags), cores, total, free)


def source_sha() -> str | None:
    """The commit of the checkout that kilat runs from, with ``+`` when files differ from it; None for an
    installed package.
    """
    root = Path(kilat.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    return head and head + (
        "+" if _git(root, "status", "--porcelain", "--untracked-files=no", "--", "src") else ""
    )


def _git(root: Path, *args: str) -> str | None:
    if shutil.which("git") is None:
        return None
    done = subprocess.run(
        ["git", "-C", str(root), *args], capture_output=True, text=True, timeout=30, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def _fields(path: Path) -> dict[str, str]:
    """``name : value`` lines; the first of each name."""
    fields: dict[str, str] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    return fields


def _number(path: Path) -> int | None:
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdecimal() else None
