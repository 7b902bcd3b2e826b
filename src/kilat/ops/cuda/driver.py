"""What is used of CUDA's driver (libcuda), through ctypes: modules and launches. Torch has made the context."""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from kilat.base.errors import EngineError

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC_SERIALIZATION = 6  # CUlaunchAttributeID


class _AttributeValue(ctypes.Union):
    _fields_ = [("flag", ctypes.c_int), ("pad", ctypes.c_char * 64)]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", _AttributeValue)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)), ("n_attributes", ctypes.c_uint),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """``blocks`` of ``threads`` with ``shared_bytes``."""

    blocks: int
    threads: int
    shared_bytes: int


def load_function(code: bytes, name: str, shared_bytes: int) -> int:
    """The kernel ``name`` of a cubin, loaded into the current context for good; may take ``shared_bytes`` of dynamic shared memory."""
    lib = _libcuda()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(lib.cuModuleLoadData(ctypes.byref(module), code))
    _check(lib.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    _check(lib.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, ctypes.c_int(shared_bytes)))
    assert function.value
    return function.value


def launch(function: int, how: Launch, stream: int, arguments: Sequence[ctypes.Structure]) -> None:
    """Starts it on ``stream``; it may begin while the kernel before still runs (programmatic dependent launch)."""
    config = _config(how, stream)
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
    _check(_libcuda().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), pointers, None))


def _config(how: Launch, stream: int) -> _Config:
    attributes = (_Attribute * 1)()
    attributes[0].id, attributes[0].value.flag = _PROGRAMMATIC_SERIALIZATION, 1
    grid, block = (ctypes.c_uint * 3)(how.blocks, 1, 1), (ctypes.c_uint * 3)(how.threads, 1, 1)
    return _Config(grid, block, how.shared_bytes, stream, attributes, 1)


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _libcuda().cuGetErrorString(status, ctypes.byref(text))
        raise EngineError(f"the CUDA driver failed: {(text.value or b'?').decode()} ({status})")


@functools.cache
def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def present() -> bool:
    """Whether there is a driver that knows programmatic launches."""
    try:
        return hasattr(_libcuda(), "cuLaunchKernelEx")
    except OSError:
        return False
