"""What is used of cuBLASLt, through ctypes: products by an algorithm that the caller names. Torch's calls take the one that the library guesses.

Source: the cuBLAS documentation, chapter "Using the cuBLASLt API"; the numbers are those of cublasLt.h.
"""

import ctypes
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kilat.ops.fp8_linear import FP8

WORKSPACE_BYTES = 32 << 20
_FP32, _BF16, _E4M3, _COMPUTE_FP32 = 0, 14, 28, 68
_TRANS_A, _EPILOGUE, _BIAS, _A_SCALE, _B_SCALE, _A_SCALE_MODE, _B_SCALE_MODE = 3, 7, 8, 17, 18, 31, 32
_EPILOGUE_BIAS, _SCALE_ROWS_OF_128, _SCALE_128_X_128 = 4, 4, 5
_PREFERENCE_WORKSPACE = 1
_TILE_IDS, _CUSTOM_MAX = 6, 7
_FIELDS = {"tile": 1, "splits": 2, "reduction": 3, "swizzle": 4, "custom": 5, "cluster": 8}


class Algorithm(ctypes.Structure):
    """How to compute a product; as bytes it may be kept for the same version of the library."""

    _fields_ = [("data", ctypes.c_uint64 * 8)]

    def with_fields(self, **fields: int) -> "Algorithm | None":
        """A copy with other values, None where the library refuses one: ``tile`` of the result, ``splits`` of K and their ``reduction``,
        ``swizzle`` (the order of tiles), ``custom`` (a choice of the algorithm's own), ``cluster`` (blocks that share tiles)."""
        copy = Algorithm.from_buffer_copy(self)
        for name, value in fields.items():
            word = (ctypes.c_uint16 if name == "cluster" else ctypes.c_uint32)(value)
            size = ctypes.sizeof(word)
            if _lib().cublasLtMatmulAlgoConfigSetAttribute(
                ctypes.byref(copy), _FIELDS[name], ctypes.byref(word), size
            ):
                return None
        return copy

    def tiles(self) -> list[int]:
        """Values that ``tile`` may have."""
        return self._able(_TILE_IDS, 256)

    def customs(self) -> range:
        """Values that ``custom`` may have."""
        return range(*(n + 1 for n in self._able(_CUSTOM_MAX, 1)))

    def _able(self, what: int, most: int) -> list[int]:
        values, written = (ctypes.c_uint32 * most)(), ctypes.c_size_t()
        size = ctypes.sizeof(values)
        if _lib().cublasLtMatmulAlgoCapGetAttribute(
            ctypes.byref(self), what, values, size, ctypes.byref(written)
        ):
            return []
        return list(values[: written.value // 4])


class _Suggestion(ctypes.Structure):
    _fields_ = [
        ("algorithm", Algorithm), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int), ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """y [T, n] bf16 = x [T, k] w [n, k]^T (+ bias [n] bf16): x and w bf16, or e4m3 with fp32 scales as ops/triton/fp8_linear.py has them."""

    fp8: bool
    n: int
    k: int
    bias: bool


@dataclass(frozen=True, slots=True)
class Operands:
    """Contiguous tensors on one device that begin at multiples of 256 bytes; scales where they are e4m3."""

    x: Tensor
    weight: Tensor
    y: Tensor
    bias: Tensor | None = None
    x_scale: Tensor | None = None
    weight_scale: Tensor | None = None

    def can_be_taken(self) -> bool:
        """Whether all begin where the library supposes them to."""
        tensors = (self.x, self.weight, self.y, self.bias, self.x_scale, self.weight_scale)
        return all(t is None or (t.data_ptr() % 256 == 0 and t.is_contiguous()) for t in tensors)


class Product:
    """One kind of product with ``n_rows`` rows. Its descriptors live as long as the process."""

    def __init__(self, kind: Kind, n_rows: int) -> None:
        self.kind, self.n_rows = kind, n_rows
        self._description = ctypes.c_void_p()
        _check(_lib().cublasLtMatmulDescCreate(ctypes.byref(self._description), _COMPUTE_FP32, _FP32))
        self._set(_TRANS_A, ctypes.c_int32(1))
        if kind.fp8:
            self._set(_A_SCALE_MODE, ctypes.c_int32(_SCALE_128_X_128))
            self._set(_B_SCALE_MODE, ctypes.c_int32(_SCALE_ROWS_OF_128))
            # what can be computed is decided by whether there are scales, not by where they are
            self._set(_A_SCALE, ctypes.c_void_p(256))
            self._set(_B_SCALE, ctypes.c_void_p(256))
        if kind.bias:
            self._set(_EPILOGUE, ctypes.c_int32(_EPILOGUE_BIAS))
        # the library counts columns first: y^T = w x^T
        of = _E4M3 if kind.fp8 else _BF16
        weight, x = _layout(of, kind.k, kind.n), _layout(of, kind.k, n_rows)
        y = _layout(_BF16, kind.n, n_rows)
        self._layouts = weight, x, y

    def suggested(self, most: int) -> list[Algorithm]:
        """What the library would take, its first choice first; empty where it has nothing for this product."""
        preference = ctypes.c_void_p()
        _check(_lib().cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        found, n = (_Suggestion * most)(), ctypes.c_int()
        try:
            limit = ctypes.c_uint64(WORKSPACE_BYTES)
            _check(
                _lib().cublasLtMatmulPreferenceSetAttribute(
                    preference, _PREFERENCE_WORKSPACE, ctypes.byref(limit), ctypes.sizeof(limit)
                )
            )
            weight, x, y = self._layouts
            failed = _lib().cublasLtMatmulAlgoGetHeuristic(
                _handle(), self._description, weight, x, y, y, preference, most, found, ctypes.byref(n)
            )
        finally:
            _lib().cublasLtMatmulPreferenceDestroy(preference)
        return (
            []
            if failed
            else [Algorithm.from_buffer_copy(s.algorithm) for s in found[: n.value] if not s.state]
        )

    def takes(self, algorithm: Algorithm) -> bool:
        """Whether the algorithm computes this product within the workspace."""
        weight, x, y = self._layouts
        result = _Suggestion()
        failed = _lib().cublasLtMatmulAlgoCheck(
            _handle(), self._description, weight, x, y, y, ctypes.byref(algorithm), ctypes.byref(result)
        )
        return not failed and result.workspace <= WORKSPACE_BYTES

    def run(self, algorithm: Algorithm, o: Operands) -> bool:
        """Launch it on the current stream; False when the library refused. One stream at a time: products share one workspace."""
        if o.weight_scale is not None and o.x_scale is not None:
            self._set(_A_SCALE, ctypes.c_void_p(o.weight_scale.data_ptr()))
            self._set(_B_SCALE, ctypes.c_void_p(o.x_scale.data_ptr()))
        if o.bias is not None:
            self._set(_BIAS, ctypes.c_void_p(o.bias.data_ptr()))
        weight, x, y = self._layouts
        space = workspace(o.y.device)
        return not _lib().cublasLtMatmul(
            _handle(), self._description, ctypes.byref(_ONE), o.weight.data_ptr(), weight, o.x.data_ptr(), x, ctypes.byref(_ZERO),
            o.y.data_ptr(), y, o.y.data_ptr(), y, ctypes.byref(algorithm), space.data_ptr(), WORKSPACE_BYTES,
            torch.cuda.current_stream(o.y.device).cuda_stream,
        )  # fmt: skip

    def _set(self, attribute: int, value: Any) -> None:
        size = ctypes.sizeof(value)
        _check(_lib().cublasLtMatmulDescSetAttribute(self._description, attribute, ctypes.byref(value), size))


_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


@functools.cache
def workspace(device: torch.device) -> Tensor:
    """What all products of a device use. Made by the first one, which is never part of a graph: what is captured has run before."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def present() -> bool:
    """Whether torch has brought a cuBLASLt."""
    try:
        _lib()
    except OSError:
        return False
    return True


def version() -> int:
    """As the library counts: 130100 for 13.1."""
    get = _lib().cublasLtGetVersion
    get.restype = ctypes.c_size_t
    return get()


def kind_of(weight: Tensor, bias: Tensor | None) -> Kind:
    """The product that a weight [n, k] is for."""
    return Kind(weight.dtype == FP8, weight.shape[0], weight.shape[1], bias is not None)


def _layout(of: int, rows: int, columns: int) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    _check(_lib().cublasLtMatrixLayoutCreate(ctypes.byref(layout), of, rows, columns, rows))
    return layout


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt failed with status {status}")


@functools.cache
def _handle() -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _check(_lib().cublasLtCreate(ctypes.byref(handle)))
    return handle


@functools.cache
def _lib() -> ctypes.CDLL:
    """The library that torch has loaded. Raises OSError where there is none."""
    lib = _first_of(("libcublasLt.so.13", "libcublasLt.so.12"))
    pointer, wide, size = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
    lib.cublasLtMatrixLayoutCreate.argtypes = [pointer, ctypes.c_int, wide, wide, ctypes.c_int64]
    lib.cublasLtMatmulDescSetAttribute.argtypes = [pointer, ctypes.c_int, pointer, size]
    lib.cublasLtMatmulPreferenceSetAttribute.argtypes = [pointer, ctypes.c_int, pointer, size]
    lib.cublasLtMatmulPreferenceDestroy.argtypes = [pointer]
    lib.cublasLtMatmulAlgoGetHeuristic.argtypes = [*[pointer] * 7, ctypes.c_int, pointer, pointer]
    lib.cublasLtMatmulAlgoCheck.argtypes = [pointer] * 8
    lib.cublasLtMatmulAlgoConfigSetAttribute.argtypes = [pointer, ctypes.c_int, pointer, size]
    lib.cublasLtMatmulAlgoCapGetAttribute.argtypes = [pointer, ctypes.c_int, pointer, size, pointer]
    lib.cublasLtMatmul.argtypes = [*[pointer] * 14, size, pointer]
    return lib


def _first_of(names: Sequence[str]) -> ctypes.CDLL:
    def found() -> Iterator[ctypes.CDLL]:
        for name in names:
            try:
                yield ctypes.CDLL(name)
            except OSError:
                continue

    lib = next(found(), None)
    if lib is None:
        raise OSError(f"none of {', '.join(names)} is there")
    return lib
