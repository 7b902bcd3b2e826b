"""linear and gated_linear with FP8 weights: few rows stream the weight through fp8_stream, many rows go to cuBLAS's block-scaled product."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kilat.ops.cuda.products import products
from kilat.ops.fp8_linear import BLOCK, FP8, Fp8Weight, whole_blocks
from kilat.ops.linear import LinearWeight
from kilat.ops.triton.fp8_rows import Fp8Rows, quantize_rows
from kilat.ops.triton.fp8_stream import stream_fp8
from kilat.ops.triton.linear_stream import Tiles
from kilat.ops.triton.norm_rows import MOST_ROWS, PLAIN, End, Factor, NormRows, join_of, without_factor
from kilat.ops.triton.rms_norm import add_rms_norm, add_rms_norm_fp8
from kilat.ops.triton.silu_mul import silu_mul, silu_mul_fp8

STREAM_ROWS = 64
"""Up to here ours is faster."""
RING_BYTES = 222_000
"""Shared memory that the rings of tiles of a multiprocessor may fill."""


@dataclass(frozen=True, slots=True)
class PackedFp8:
    """The e4m3 weight [N, K], its scales [ceil(N / 128), ceil(K / 128)] in rows of a multiple of 16 bytes, and the counters of cuts."""

    weight: Tensor
    scale: Tensor
    done: Tensor


def pack_fp8(w: Fp8Weight, bias: Tensor | None = None) -> LinearWeight:
    """Contract: ops/fp8_linear.py. Keeps the weight; two calls on one weight may not run side by side."""
    n_out, n_in = w.data.shape
    if n_in % 16:
        raise ValueError(f"an FP8 product needs K to be a multiple of 16, got {n_in}")
    groups = triton.cdiv(n_in, BLOCK)
    scale = w.scale.new_zeros(w.scale.shape[0], (groups + 3) // 4 * 4)
    scale[:, :groups] = w.scale
    done = torch.zeros(triton.cdiv(n_out, 64), dtype=torch.int32, device=w.data.device)
    data = w.data.contiguous()
    products().register(data)
    return LinearWeight(PackedFp8(data, scale, done), (n_out, n_in), FP8, bias, w.n_bytes)


def cut_linear(w: LinearWeight, outputs: slice) -> LinearWeight | None:
    """Contract: ops/fp8_linear.py. The view shares the counters: the two may not run side by side."""
    blocks = whole_blocks(outputs, w.shape[0])
    if blocks is None:
        return None
    data, scale = w.data.weight[outputs], w.data.scale[blocks]
    bias = None if w.bias is None else w.bias[outputs]
    n_bytes = data.numel() + scale.numel() * scale.element_size()
    return LinearWeight(PackedFp8(data, scale, w.data.done), (data.shape[0], w.shape[1]), FP8, bias, n_bytes)


def linear(x: Tensor | Fp8Rows | NormRows, w: LinearWeight) -> Tensor:
    """Contract: ops/fp8_linear.py, for bf16; x may be quantized already. Not batch-invariant."""
    rows, factor = _rows(x)
    if rows.n_rows > STREAM_ROWS and _library_takes(w):
        return _library(rows, w)
    return _stream(rows, w, tiles_for(rows.n_rows, *w.shape), End(factor=factor))


def linear_exact(x: Tensor | Fp8Rows, w: LinearWeight) -> Tensor:
    """Contract: ops/fp8_linear.py, for bf16; x may be quantized already. Batch-invariant: K is never cut."""
    rows, _ = _rows(x)
    return _stream(rows, w, exact_tiles_for(rows.n_rows, w.shape[0]))


def linear_add_rms_norm(
    x: Tensor | Fp8Rows, w: LinearWeight, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor | NormRows, Tensor]:
    """As linear.py has it, with a weight in FP8 and rows in bf16."""
    rows, _ = _rows(x)
    if rows.n_rows > MOST_ROWS:
        return add_rms_norm(linear(rows, w), residual, weight, eps)
    return _joined(rows, w, residual, weight, eps, quantize=False)


def linear_add_rms_norm_fp8(
    x: Tensor | Fp8Rows, w: LinearWeight, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Fp8Rows | NormRows, Tensor]:
    """add_rms_norm_fp8(linear(x, w), residual, weight, eps); few rows are one kernel, whose tiles are whole groups."""
    rows, _ = _rows(x)
    if rows.n_rows > MOST_ROWS:
        return add_rms_norm_fp8(linear(rows, w), residual, weight, eps)
    return _joined(rows, w, residual, weight, eps, quantize=True)


def _joined(
    rows: Fp8Rows, w: LinearWeight, residual: Tensor, weight: Tensor, eps: float, *, quantize: bool
) -> tuple[NormRows, Tensor]:
    tiles = tiles_for(rows.n_rows, *w.shape)
    residual = residual.contiguous()
    join = join_of(residual, weight, rows.n_rows, tiles.outputs)
    made = _stream(rows, w, tiles, End(quantize=quantize, join=join))
    return NormRows(made, Factor(join.squares, eps)), residual


def gated_linear(x: Tensor | Fp8Rows | NormRows, w: LinearWeight) -> Tensor:
    """silu_mul(linear(x, w)): w [2 I, K] (gate first, then up) -> [T, I]. Not batch-invariant."""
    rows, factor = _rows(x)
    if rows.n_rows > STREAM_ROWS or w.shape[0] % (2 * BLOCK):
        return silu_mul(linear(x, w))
    return _stream(rows, w, gated_tiles_for(rows.n_rows), End(gate=True, factor=factor))


def gated_linear_fp8(x: Tensor | Fp8Rows | NormRows, w: LinearWeight) -> Fp8Rows:
    """quantize_rows(gated_linear(x, w))."""
    rows, factor = _rows(x)
    if rows.n_rows > STREAM_ROWS or w.shape[0] % (2 * BLOCK):
        return silu_mul_fp8(linear(x, w))
    tiles = gated_tiles_for(rows.n_rows)
    if tiles.outputs < BLOCK:
        return quantize_rows(_stream(rows, w, tiles, End(gate=True, factor=factor)))
    return _stream(rows, w, tiles, End(gate=True, quantize=True, factor=factor))


def gated_linear_exact(x: Tensor | Fp8Rows, w: LinearWeight) -> Tensor:
    """silu_mul(linear_exact(x, w))."""
    return silu_mul(linear_exact(x, w))


def gated_linear_exact_fp8(x: Tensor | Fp8Rows, w: LinearWeight) -> Fp8Rows:
    """quantize_rows(gated_linear_exact(x, w)), to the bit."""
    return silu_mul_fp8(linear_exact(x, w))


def _rows(x: Tensor | Fp8Rows | NormRows) -> tuple[Fp8Rows, Factor | None]:
    """The rows quantized, and the factor that they lack."""
    rows, factor = without_factor(x)
    return rows if isinstance(rows, Fp8Rows) else quantize_rows(rows), factor


def _stream(x: Fp8Rows, w: LinearWeight, tiles: Tiles, end: End = PLAIN) -> Any:
    return stream_fp8(x, w.data.weight, w.data.scale, w.bias, w.data.done, tiles, end)


def _library_takes(w: LinearWeight) -> bool:
    return w.shape[0] % BLOCK == 0 and w.shape[1] % BLOCK == 0


def _library(x: Fp8Rows, w: LinearWeight) -> Tensor:
    y = products().multiply(x.data, w.data.weight, x_scale=x.scale, weight_scale=w.data.scale)
    y = y[: x.n_rows]
    return y if w.bias is None else y + w.bias


def tiles_for(n_rows: int, n_out: int, n_in: int) -> Tiles:
    """Measured on H200 at 1, 8, 64 rows in whole steps of the 8B shapes: K is cut where few outputs leave multiprocessors idle."""
    rows = max(8, triton.next_power_of_2(n_rows))
    if rows > 64:
        return _ring(64, 128, 128, 1, warps=8)
    cuts = 4 if n_out <= 4096 else 2 if n_out <= 8192 else 1
    if rows <= 16:
        long = n_in >= 8192 and n_out <= 4096
        return _ring(128, rows, 256, 8 if long and n_rows <= 2 else 4 if n_out <= 8192 else 1, programs=2)
    if rows == 64 and n_in < 8192:
        return _ring(64, rows, 256, 1 if n_out > 8192 else 2, programs=2 if 4096 < n_out <= 8192 else 1)
    return _ring(
        64, rows, 256, 1 if rows == 64 and n_out > 4096 else cuts, programs=2 if n_out <= 4096 else 1
    )


def gated_tiles_for(n_rows: int) -> Tiles:
    """Tiles of 64 or 128 gates and the ups that go with them."""
    rows = max(8, triton.next_power_of_2(n_rows))
    if n_rows <= 2:
        return _ring(64, rows, 256, 1, programs=2, gated=True)
    if rows == 16:
        return _ring(BLOCK, rows, 256, 1, gated=True)
    return _ring(BLOCK if rows <= 32 else 64, rows, 128, 1, programs=2, gated=True)


def exact_tiles_for(n_rows: int, n_out: int) -> Tiles:
    """Tiles change nothing in the bits."""
    rows = min(128, max(8, triton.next_power_of_2(n_rows)))
    if rows == 128:
        return _ring(64 if n_out <= 4096 else 128, 128, 128, 1, warps=8)
    return _ring(64, rows, 256, 1, programs=1 if n_out <= 8192 else 2)


def _ring(
    outputs: int, rows: int, inner: int, cuts: int, *, programs: int = 1, warps: int = 4, gated: bool = False
) -> Tiles:
    """As many stages as fit when ``programs`` share a multiprocessor, at most 16."""
    stage_bytes = ((2 if gated else 1) * outputs + rows) * inner
    return Tiles(outputs, rows, inner, min(16, RING_BYTES // programs // stage_bytes), warps, cuts)
