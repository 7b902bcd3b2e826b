"""Builds native/cpu into a shared library in the cache folder, once per version of its sources, flags and compiler."""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from kilat.base import env
from kilat.base.errors import ConfigError
from kilat.base.log import event, get_logger

TIMEOUT_S = 300
_FLAGS = (
    "-std=c++17 -O2 -fPIC -fvisibility=hidden -fno-exceptions -fno-rtti -fno-strict-aliasing -ffp-contract=off -pthread"
    " -Wno-psabi"
).split()
_AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c".split()
# File -> flags of its own. Only the file of an instruction set may use it; which one runs is decided at run time.
_X86 = {
    "isa_avx2.cpp": ["-mavx2", "-mfma"],
    "isa_avx512.cpp": _AVX512,
    "isa_avx512bf16.cpp": [*_AVX512, "-mavx512bf16", "-mavx512vnni"],
}
_COMMON: dict[str, list[str]] = {
    "kilat_cpu.cpp": [],
    "arena.cpp": [],
    "pool.cpp": [],
    "quant.cpp": [],
    "isa_plain.cpp": [],
}
_COMPILERS = ("g++", "clang++", "c++")


def source_dir() -> Path | None:
    """The folder of the C++ sources: inside an installed package, or in the checkout; None if neither is there."""
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "native" / "cpu", package.parents[1] / "native" / "cpu"):
        if (folder / "kilat_cpu.h").is_file():
            return folder
    return None


def compiler() -> str | None:
    """Path of the first C++ compiler found, or None."""
    found = (shutil.which(name) for name in _COMPILERS)
    return next((path for path in found if path), None)


def build() -> Path:
    """Path of the shared library, built now if the cache has none for these sources.

    Processes that start together build once (a lock file). Raises ConfigError with the reason when it cannot be built.
    """
    sources = source_dir()
    if sources is None:
        raise ConfigError(
            "the sources of the CPU kernels (native/cpu) are not installed: install kilat from a checkout"
        )
    cxx = compiler()
    if cxx is None:
        raise ConfigError(
            f"no C++ compiler found (looked for {', '.join(_COMPILERS)}): install one, e.g. `apt install g++`"
        )
    units = dict(_COMMON)
    if platform.machine() in ("x86_64", "AMD64"):
        units.update(_X86)
    folder = env.cache_dir() / "native"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{_fingerprint(sources, units, cxx)}.so"
    if target.exists():
        return target
    with (folder / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            event(get_logger("ops.cpu"), "building the CPU kernels, once", compiler=cxx, library=target)
            _compile(cxx, sources, units, target)
    return target


def _fingerprint(sources: Path, units: dict[str, list[str]], cxx: str) -> str:
    """Hash of everything that decides the library's bits; the compiler by path, size and time."""
    digest = hashlib.blake2b(digest_size=12)
    stat = os.stat(cxx)
    digest.update(repr((_FLAGS, sorted(units.items()), cxx, stat.st_size, stat.st_mtime_ns)).encode())
    for path in sorted(sources.glob("*.h")) + sorted(sources.glob("*.cpp")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _compile(cxx: str, sources: Path, units: dict[str, list[str]], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as raw:
        work = Path(raw)
        jobs = []
        for name, flags in units.items():
            command = [cxx, *_FLAGS, *flags, "-c", str(sources / name), "-o", str(work / f"{name}.o")]
            jobs.append(
                subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            )
        failures = [error for job in jobs if (error := _failure(job))]
        if failures:
            raise ConfigError(f"the CPU kernels do not compile with {cxx}: {failures[0]}")
        out = work / "kilat_cpu.so"
        link = [cxx, "-shared", "-pthread", "-o", str(out), *(str(work / f"{name}.o") for name in units)]
        job = subprocess.Popen(link, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if error := _failure(job):
            raise ConfigError(f"the CPU kernels do not link with {cxx}: {error}")
        os.replace(out, target)


def _failure(job: subprocess.Popen[str]) -> str | None:
    """Wait for a compiler; None if it succeeded, else the first lines of what it said."""
    try:
        _, errors = job.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        job.kill()
        job.communicate()
        return f"no result after {TIMEOUT_S} s"
    return None if job.returncode == 0 else errors.strip()[:600] or f"exit status {job.returncode}"
