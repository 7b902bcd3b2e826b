"""Compiles CUDA C++ with the NVRTC that comes with torch's CUDA wheels; the cubins are kept in the cache folder."""

import ctypes
import functools
import os
import tempfile
from hashlib import blake2b
from pathlib import Path

import torch

from kilat.base import env
from kilat.base.errors import ConfigError
from kilat.base.log import event, get_logger

TARGET = "sm_90a"


def cubin(sources: tuple[Path, ...], options: tuple[str, ...]) -> bytes:
    """The machine code of ``sources``, one after the other, for Hopper; from the cache, else compiled (about a second).

    Raises ConfigError with the reason where NVRTC is missing or refuses the source.
    """
    text = b"\n".join(source.read_bytes() for source in sources)
    name = sources[-1].name
    major, minor = _version()
    key = blake2b("\0".join((f"{major}.{minor}", TARGET, *options)).encode() + b"\0" + text, digest_size=16)
    path = env.cache_dir() / "cuda" / f"{name}-{key.hexdigest()}.cubin"
    if path.is_file():
        return path.read_bytes()
    code = compile_source(text, name, options)[0]
    try:
        keep(path, code)
    except OSError as e:  # it is compiled again next time
        event(get_logger("ops.cuda"), "machine code could not be kept", folder=path.parent, why=e.strerror)
    return code


def keep(path: Path, content: bytes) -> None:
    """Write a whole file, or none. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # several processes may write the same one: each writes a file of its own, a whole one takes the name
    own = tempfile.NamedTemporaryFile(dir=path.parent, delete=False)  # noqa: SIM115  (closed below, before it is renamed)
    try:
        with own:
            own.write(content)
        os.replace(own.name, path)
    except OSError:
        os.unlink(own.name)  # on a full disk each start would leave one
        raise


def compile_source(text: bytes, name: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    """(cubin, what the compiler said)."""
    lib = _nvrtc()
    program = ctypes.c_void_p()
    _check(lib.nvrtcCreateProgram(ctypes.byref(program), text, name.encode(), 0, None, None))
    try:
        every = [f"--gpu-architecture={TARGET}", "--std=c++17", *options]
        status = lib.nvrtcCompileProgram(
            program, len(every), (ctypes.c_char_p * len(every))(*map(str.encode, every))
        )
        size = ctypes.c_size_t()
        _check(lib.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        said = ctypes.create_string_buffer(size.value)
        _check(lib.nvrtcGetProgramLog(program, said))
        log = said.value.decode(errors="replace").strip()
        if status:
            raise ConfigError(f"NVRTC does not compile {name}: {log[:2000]}")
        _check(lib.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _check(lib.nvrtcGetCUBIN(program, code))
        return code.raw, log
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _check(status: int) -> None:
    if status:
        _nvrtc().nvrtcGetErrorString.restype = ctypes.c_char_p
        raise ConfigError(f"NVRTC failed: {_nvrtc().nvrtcGetErrorString(status).decode()}")


@functools.cache
def _version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The NVRTC beside torch, else one that the system's linker finds."""
    packages = Path(torch.__file__).resolve().parent.parent
    for name in (
        *sorted(packages.glob("nvidia/*/lib/libnvrtc.so.*")),
        Path("libnvrtc.so.13"),
        Path("libnvrtc.so.12"),
    ):
        lib = load_nvrtc(name)
        if lib is not None:
            return lib
    raise ConfigError(
        "no NVRTC library (libnvrtc.so): install a CUDA build of torch with its nvidia packages"
    )


def load_nvrtc(path: Path) -> ctypes.CDLL | None:
    """The library, or None where it does not load. It opens its built-ins by name only, so those beside it are loaded first."""
    try:
        for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins))
        return ctypes.CDLL(str(path))
    except OSError:
        return None
