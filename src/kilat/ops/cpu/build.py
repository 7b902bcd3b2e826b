"""Builds native/cpu into a shared library in the cache folder, once per version of its sources, flags and compiler."""

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from kilat.base import env
from kilat.base.errors import ConfigError
from kilat.base.log import event, get_logger

TIMEOUT_S = 300
_FLAGS = (
    "-std=c++17 -O2 -fPIC -fvisibility=hidden -fno-strict-aliasing -ffp-contract=off -pthread -Wno-psabi"
).split()
_HEADER = re.compile(r'"([^"\n]+\.h)"')
_PLAIN = ["-fno-exceptions", "-fno-rtti"]
_AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c".split()
_AVX512_BF16 = [*_AVX512, "-mavx512bf16", "-mavx512vnni"]
# File -> flags of its own. Only the file of an instruction set may use it; which one runs is decided at run time.
_X86 = {
    "isa_avx2.cpp": ["-mavx2", "-mfma"],
    "isa_avx512.cpp": _AVX512,
    "isa_avx512bf16.cpp": _AVX512_BF16,
    "isa_amx.cpp": _AVX512_BF16,
    "amx_choice.cpp": [],
    "amx_machine.cpp": [],
}
_COMMON: dict[str, list[str]] = {
    "kilat_cpu.cpp": [],
    "arena.cpp": [],
    "layers.cpp": [],
    "pack.cpp": [],
    "pool.cpp": [],
    "quant.cpp": [],
    "isa_plain.cpp": [],
}
# a source file -> its bytes and the headers that it names
_Reader = Callable[[Path], tuple[bytes, list[Path]] | None]
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
    units = {**_COMMON, **(_X86 if platform.machine() in ("x86_64", "AMD64") else {})}
    return {name: [*_PLAIN, *own] for name, own in units.items()}


def build() -> Path:
    """Path of the shared library, built now if the cache has none for these sources. Raises ConfigError with the reason when it
    cannot be built."""
    return build_library("the CPU kernels", cpu_units())


def build_library(what: str, units: dict[str, list[str]]) -> Path:
    """The shared library of ``units`` (paths relative to native/cpu -> flags of their own), from the cache or built now. ``what`` it is
    goes into messages.

    Processes that start together build once (a lock file), and a file that two libraries share is compiled once. Raises ConfigError
    with the reason when it cannot be built.
    """
    sources = source_dir()
    if sources is None:
        raise ConfigError(
            f"the sources of {what} (native/cpu) are not installed beside kilat: install it again"
        )
    cxx = compiler()
    if cxx is None:
        raise ConfigError(
            f"no C++ compiler found (looked for {', '.join(_COMPILERS)}): install one, e.g. `apt install g++`"
        )
    folder = env.cache_dir() / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _from_cache(what, [cxx, *_FLAGS], units, sources, folder)
    except OSError as error:
        raise ConfigError(
            f"{what} cannot be put into {folder} ({error.strerror}): make room there, or set KILAT_CACHE_DIR to a folder that can be written"
        ) from error


def _from_cache(
    what: str, compile_: list[str], units: dict[str, list[str]], sources: Path, folder: Path
) -> Path:
    """The library of ``units`` of ``sources`` in ``folder``, built now if it is not there. Raises ConfigError for what does not compile,
    OSError for a folder that cannot be written."""
    read = cache(_read)  # most headers are named by most units
    # path, flags and what becomes of it
    objects = {
        sources / name: (
            own,
            folder / "objects" / f"{_fingerprint(sources / name, [*compile_, *own], read)}.o",
        )
        for name, own in units.items()
    }
    names = "".join(out.name for _, out in objects.values())
    target = folder / f"{hashlib.blake2b(names.encode(), digest_size=12).hexdigest()}.so"
    if target.exists():
        return target
    with (folder / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            event(get_logger("ops.cpu"), f"building {what}, once", compiler=compile_[0], library=target)
            _compile(what, compile_, objects, target)
    return target


def _fingerprint(source: Path, command: list[str], read: _Reader) -> str:
    """Hash of everything that decides an object's bits: the file, the headers it names, the command, the compiler's size and time."""
    digest = hashlib.blake2b(digest_size=12)
    stat = os.stat(command[0])
    digest.update(repr((command, stat.st_size, stat.st_mtime_ns)).encode())
    for path, content in sorted(_with_headers(source.resolve(), {}, read).items()):
        digest.update(path.name.encode() + b"\0" + content + b"\0")
    return digest.hexdigest()


def _with_headers(source: Path, found: dict[Path, bytes], read: _Reader) -> dict[Path, bytes]:
    """``found`` with the bytes of ``source`` and of all headers that it names, or that those name."""
    if source not in found and (file := read(source)) is not None:
        found[source], headers = file
        for header in headers:
            _with_headers(header, found, read)
    return found


def _read(path: Path) -> tuple[bytes, list[Path]] | None:
    """The bytes of a source file and the headers that it names; None where there is no such file."""
    if not path.is_file():
        return None
    content = path.read_bytes()
    return content, [(path.parent / name).resolve() for name in _HEADER.findall(content.decode("utf-8"))]


def _compile(
    what: str, compile_: list[str], objects: dict[Path, tuple[list[str], Path]], target: Path
) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as raw:
        work = Path(raw)

        def make(source: Path, own: list[str], out: Path) -> str | None:
            made = work / out.name
            error = _run([*compile_, *own, "-c", str(source), "-o", str(made)])
            if error is None:
                out.parent.mkdir(exist_ok=True)
                os.replace(made, out)
            return error

        # a few at a time: a compiler takes hundreds of MB
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [
                pool.submit(make, source, own, out)
                for source, (own, out) in objects.items()
                if not out.exists()
            ]
        failures = [error for job in jobs if (error := job.result())]
        if failures:
            raise ConfigError(f"{what} do not compile with {compile_[0]}: {failures[0]}")
        out = work / "kilat.so"
        inputs = [str(made) for _, made in objects.values()]
        # one library's names are not another's: processes load several
        link = [compile_[0], "-shared", "-pthread", "-Wl,-Bsymbolic", "-o", str(out), *inputs]
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
