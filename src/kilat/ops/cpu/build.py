"""Builds native/cpu into a shared library in the cache folder, once per version of its sources, flags and compiler."""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kilat.base import env
from kilat.base.errors import ConfigError
from kilat.base.log import event, get_logger

TIMEOUT_S = 300
_FLAGS = (
    "-std=c++17 -O2 -fPIC -fvisibility=hidden -fno-strict-aliasing -ffp-contract=off -pthread -Wno-psabi"
).split()
_NO_EXCEPTIONS = ("-fno-exceptions", "-fno-rtti")
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


def cpu_units() -> dict[str, list[str]]:
    """File -> flags of its own, for every file of native/cpu that this machine's kind of processor needs."""
    return {**_COMMON, **(_X86 if platform.machine() in ("x86_64", "AMD64") else {})}


def build() -> Path:
    """Path of the shared library, built now if the cache has none for these sources. Raises ConfigError with the reason when it
    cannot be built."""
    return build_library("the CPU kernels", cpu_units(), _NO_EXCEPTIONS)


def build_library(what: str, units: dict[str, list[str]], common: Sequence[str]) -> Path:
    """The shared library of ``units`` (paths relative to native/cpu -> flags of their own) with the ``common`` flags, from the cache or
    built now. ``what`` it is goes into messages.

    Processes that start together build once (a lock file). Raises ConfigError with the reason when it cannot be built.
    """
    sources = source_dir()
    if sources is None:
        raise ConfigError(f"the sources of {what} (native/) are not installed: install kilat from a checkout")
    cxx = compiler()
    if cxx is None:
        raise ConfigError(
            f"no C++ compiler found (looked for {', '.join(_COMPILERS)}): install one, e.g. `apt install g++`"
        )
    folder = env.cache_dir() / "native"
    folder.mkdir(parents=True, exist_ok=True)
    flags = [*_FLAGS, *common]
    target = folder / f"{_fingerprint(sources, units, [cxx, *flags])}.so"
    if target.exists():
        return target
    with (folder / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            event(get_logger("ops.cpu"), f"building {what}, once", compiler=cxx, library=target)
            _compile(what, [cxx, *flags], sources, units, target)
    return target


def _fingerprint(sources: Path, units: dict[str, list[str]], compile_: list[str]) -> str:
    """Hash of everything that decides the library's bits; the compiler by path, size and time."""
    digest = hashlib.blake2b(digest_size=12)
    stat = os.stat(compile_[0])
    digest.update(repr((sorted(units.items()), compile_, stat.st_size, stat.st_mtime_ns)).encode())
    folders = {(sources / unit).resolve().parent for unit in units}
    headers = [h for folder in (*folders, sources.parent / "include") for h in folder.glob("*.h")]
    for path in sorted(headers) + sorted(sources / unit for unit in units):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _compile(
    what: str, compile_: list[str], sources: Path, units: dict[str, list[str]], target: Path
) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as raw:
        work = Path(raw)
        # a few at a time: a compiler takes hundreds of MB
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [
                pool.submit(_run, [*compile_, *own, "-c", str(sources / name), "-o", str(work / f"{i}.o")])
                for i, (name, own) in enumerate(units.items())
            ]
        failures = [error for job in jobs if (error := job.result())]
        if failures:
            raise ConfigError(f"{what} do not compile with {compile_[0]}: {failures[0]}")
        objects = sorted(map(str, work.glob("*.o")))
        out = work / "kilat.so"
        link = [compile_[0], "-shared", "-pthread", "-o", str(out), *objects]
        if error := _run(link):
            raise ConfigError(f"{what} do not link with {compile_[0]}: {error}")
        os.replace(out, target)


def _run(command: list[str]) -> str | None:
    """Run a compiler; None if it succeeded, else the first lines of what it said."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"no result after {TIMEOUT_S} s"
    return None if done.returncode == 0 else done.stderr.strip()[:600] or f"exit status {done.returncode}"
