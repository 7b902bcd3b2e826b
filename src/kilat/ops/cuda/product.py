"""The matrix product of product.cu: y = x W^T with FP8 or bf16 on Hopper, with an optional gate behind it."""

import ctypes
import functools
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor

from kilat.base.errors import ConfigError
from kilat.base.log import get_logger
from kilat.ops.cuda import driver
from kilat.ops.cuda.compile import cubin
from kilat.ops.fp8_linear import BLOCK
from kilat.ops.triton.fp8_rows import Fp8Rows, empty_rows

SHARED_BYTES = 232_448
"""Shared memory that a block may have on Hopper."""
GATES = ("", "silu", "silu_fp8")
THREADS = 384
SOURCE = Path(__file__).with_name("product.cu")


@dataclass(frozen=True, slots=True)
class Tiles:
    """A block computes ``rows`` (64 or 128) x ``outputs`` (128, 192 or 256) over a ``1 / cuts`` share of K.

    The blocks of a cluster, at most 8: ``cuts`` of one tile, times ``share_x`` tiles of the same rows that fetch x together, times
    ``share_w`` (1 or 2) tiles of the same outputs that fetch W together. ``stages`` places of the ring; 0: as many as fit.
    """

    rows: int
    outputs: int
    cuts: int = 1
    share_x: int = 1
    share_w: int = 1
    stages: int = 0

    @property
    def cluster(self) -> int:
        return self.cuts * self.share_x * self.share_w

    @property
    def places(self) -> int:
        return self.stages or (SHARED_BYTES - 2048) // ((self.rows + self.outputs) * 128)

    @property
    def ring_bytes(self) -> int:
        """With what aligning it may take."""
        return self.places * (self.rows + self.outputs) * 128 + 1024


class _Sizes(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int)
        for name in ("n_rows", "n_out", "steps", "row_groups", "x_rows", "w_stride", "x_stride", "out_stride")
    ]


@functools.cache
def can_run() -> bool:
    """Whether this machine has a Hopper device, a driver and a compiler for it; says once what is missing on one that has the device."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return False
    try:
        if not driver.present():
            raise ConfigError("no libcuda.so.1 with cuLaunchKernelEx")
        _function(Tiles(64, 128), True, 0, torch.cuda.current_device())
    except ConfigError as e:
        get_logger("ops").log(logging.WARNING, "products stay with Triton and cuBLAS: %s", e)
        return False
    return True


def fits(n_out: int, n_in: int, gate: str = "") -> bool:
    """Whether a weight of ``n_out`` outputs (of y) and ``n_in`` inputs is one that the kernel takes."""
    return n_out % (BLOCK if gate == "silu_fp8" else 8) == 0 and n_in % BLOCK == 0 and n_in >= 8 * BLOCK


def product_fp8(
    x: Fp8Rows, weight: Tensor, w_scale: Tensor, bias: Tensor | None, t: Tiles, gate: str = ""
) -> Tensor | Fp8Rows:
    """x [T, K], weight [N, K] e4m3, w_scale [ceil(N / 128), >= K / 128] -> [T, N] bf16; what fits() takes.

    ``gate`` "silu": silu(first half of the outputs) * second half, [T, N / 2] bf16; "silu_fp8": the same quantized. The same bits
    every time; batch-invariant for equal ``cuts``.
    """
    n_out = weight.shape[0] // 2 if gate else weight.shape[0]
    rows_out = empty_rows(x.n_rows, n_out, x.data.device) if gate == "silu_fp8" else None
    out = (
        rows_out.data
        if rows_out
        else torch.empty(x.n_rows, n_out, dtype=torch.bfloat16, device=x.data.device)
    )
    sizes = _sizes(x.n_rows, n_out, weight.shape[1] // BLOCK, t)
    sizes.w_stride, sizes.x_stride = w_scale.stride(0), x.scale.stride(0)
    sizes.out_stride = rows_out.scale.stride(0) if rows_out else 0
    _launch(
        x.data, weight, (w_scale, x.scale, bias, out, rows_out.scale if rows_out else None), sizes, t, gate
    )
    return rows_out or out


def product_bf16(x: Tensor, weight: Tensor, bias: Tensor | None, t: Tiles, gate: str = "") -> Tensor:
    """x [T, K], weight [N, K] bf16, contiguous -> [T, N]; ``gate`` "silu" as in product_fp8. The same bits every time."""
    n_out = weight.shape[0] // 2 if gate else weight.shape[0]
    out = x.new_empty(x.shape[0], n_out)
    sizes = _sizes(x.shape[0], n_out, weight.shape[1] // 64, t)
    _launch(x, weight, (None, None, bias, out, None), sizes, t, gate)
    return out


def _sizes(n_rows: int, n_out: int, steps: int, t: Tiles) -> _Sizes:
    part = 8 * t.share_x
    x_rows = min(t.rows, triton.cdiv(n_rows, part) * part)
    return _Sizes(n_rows, n_out, steps, triton.cdiv(n_rows, t.rows * t.share_w), x_rows)


def _launch(
    x: Tensor, weight: Tensor, pointers: tuple[Tensor | None, ...], sizes: _Sizes, t: Tiles, gate: str
) -> None:
    fp8 = x.dtype != torch.bfloat16
    kind = GATES.index(gate)
    if x.is_meta:
        cubin(SOURCE, _options(t, fp8, kind))
        return
    function = _function(t, fp8, kind, x.get_device())
    how = launch_of(sizes.n_rows, sizes.n_out, t, gate)
    w_map = driver.tensor_map(weight, t.outputs // 2)
    x_map = driver.tensor_map(x, sizes.x_rows // t.share_x)
    addresses = (ctypes.c_void_p(0 if p is None else p.data_ptr()) for p in pointers)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    driver.launch(function, how, stream, (w_map, x_map, sizes, *addresses))


def launch_of(n_rows: int, n_out: int, t: Tiles, gate: str = "") -> driver.Launch:
    """How ``n_rows`` x ``n_out`` (of y) are spread over blocks."""
    groups = triton.cdiv(n_rows, t.rows * t.share_w)
    groups *= triton.cdiv(n_out, (t.outputs // 2 if gate else t.outputs) * t.share_x)
    return driver.Launch(groups * t.cluster, THREADS, t.cluster, t.ring_bytes)


def _options(t: Tiles, fp8: bool, gate: int) -> tuple[str, ...]:
    macros = {
        "FP8": int(fp8), "BM": t.rows, "BN": t.outputs, "CUTS": t.cuts, "SHARE_X": t.share_x, "SHARE_W": t.share_w,
        "STAGES": t.places, "GATE": gate,
    }  # fmt: skip
    return tuple(f"-D{name}={value}" for name, value in macros.items())


@functools.cache
def _function(t: Tiles, fp8: bool, gate: int, device: int) -> int:
    """The loaded kernel; ``device`` is the current one, whose context it is loaded into."""
    return driver.load_function(cubin(SOURCE, _options(t, fp8, gate)), "product", t.ring_bytes)
