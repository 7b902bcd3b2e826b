"""What is used of CUDA's driver (libcuda), through ctypes: modules, launches with clusters, tensor maps. Torch has made the context."""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kilat.base.errors import EngineError

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER_DIMENSION, _PROGRAMMATIC_SERIALIZATION = 4, 6  # CUlaunchAttributeID
_UINT8, _BFLOAT16, _SWIZZLE_128B, _PROMOTE_256B = 0, 9, 3, 3  # CUtensorMap...


class TensorMap(ctypes.Structure):
    """A CUtensorMap: where a tensor lies and what a box of it is."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]


class _AttributeValue(ctypes.Union):
    _fields_ = [("cluster", ctypes.c_uint * 3), ("flag", ctypes.c_int), ("pad", ctypes.c_char * 64)]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", _AttributeValue)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)), ("n_attributes", ctypes.c_uint),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """``blocks`` of ``threads`` with ``shared_bytes``, ``cluster`` of them together."""

    blocks: int
    threads: int
    cluster: int
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


def launch(
    function: int, how: Launch, stream: int, arguments: Sequence[ctypes._SimpleCData | ctypes.Structure]
) -> None:
    """Starts it on ``stream``; it may begin while the kernel before still runs (programmatic dependent launch)."""
    config = _config(how, stream)
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
    _check(_libcuda().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), pointers, None))


def clusters_at_once(function: int, how: Launch) -> int:
    """How many clusters of this launch the device runs at the same time."""
    count = ctypes.c_int()
    config = _config(how, 0)
    _check(
        _libcuda().cuOccupancyMaxActiveClusters(
            ctypes.byref(count), ctypes.c_void_p(function), ctypes.byref(config)
        )
    )
    return count.value


def tensor_map(tensor: Tensor, box_rows: int) -> TensorMap:
    """Of a contiguous tensor [rows, inner] of bytes or bf16, its address and its rows' bytes multiples of 16: boxes of ``box_rows`` (at
    most 256) by 128 bytes, swizzled by 128 bytes; 0 outside the tensor."""
    size, (rows, inner) = tensor.element_size(), tensor.shape
    kind = _BFLOAT16 if tensor.dtype == torch.bfloat16 else _UINT8
    # the driver wants its address to be a multiple of 64
    room = (ctypes.c_char * (ctypes.sizeof(TensorMap) + 64))()
    made = TensorMap.from_buffer(room, -ctypes.addressof(room) % 64)
    shape, stride = (ctypes.c_uint64 * 2)(inner, rows), (ctypes.c_uint64 * 1)(inner * size)
    box, every = (ctypes.c_uint32 * 2)(128 // size, box_rows), (ctypes.c_uint32 * 2)(1, 1)
    address = ctypes.c_void_p(tensor.data_ptr())
    _check(
        _libcuda().cuTensorMapEncodeTiled(
            ctypes.byref(made),
            kind,
            2,
            address,
            shape,
            stride,
            box,
            every,
            0,
            _SWIZZLE_128B,
            _PROMOTE_256B,
            0,
        )
    )
    return made


def _config(how: Launch, stream: int) -> _Config:
    attributes = (_Attribute * 2)()
    attributes[0].id, attributes[0].value.cluster = _CLUSTER_DIMENSION, (ctypes.c_uint * 3)(how.cluster, 1, 1)
    attributes[1].id, attributes[1].value.flag = _PROGRAMMATIC_SERIALIZATION, 1
    grid, block = (ctypes.c_uint * 3)(how.blocks, 1, 1), (ctypes.c_uint * 3)(how.threads, 1, 1)
    return _Config(grid, block, how.shared_bytes, stream, attributes, 2)


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _libcuda().cuGetErrorString(status, ctypes.byref(text))
        raise EngineError(f"the CUDA driver failed: {(text.value or b'?').decode()} ({status})")


@functools.cache
def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def present() -> bool:
    """Whether there is a driver that knows clusters."""
    try:
        return hasattr(_libcuda(), "cuLaunchKernelEx")
    except OSError:
        return False
