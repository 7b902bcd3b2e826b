"""linear and gated_linear: few rows stream the weight through linear_stream, many rows go to cuBLAS (ops/cuda/products.py), which measured
better from there on."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kilat.ops.cuda.products import products
from kilat.ops.linear import LinearWeight
from kilat.ops.triton import fp8_linear
from kilat.ops.triton.fp8_linear import PackedFp8
from kilat.ops.triton.launch import can_overlap
from kilat.ops.triton.linear_stream import Tiles, stream
from kilat.ops.triton.norm_rows import MOST_ROWS, End, Factor, NormRows, join_of, without_factor
from kilat.ops.triton.rms_norm import add_rms_norm
from kilat.ops.triton.silu_mul import silu_mul

STREAM_ROWS = 64
"""Up to here ours is faster; from 96 rows on cuBLAS is, with the gate as a pass of its own too."""
RING_BYTES = 222_000
"""Shared memory that one program's ring of tiles may fill."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The weight [N, K] as loaded, and the counters of finished cuts, one per tile of y; zero between calls."""

    weight: Tensor
    done: Tensor


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
    """Contract: ops/linear.py. Keeps the tensor; two calls on one weight may not run side by side."""
    weight = weight.contiguous()
    n_out, n_in = weight.shape
    done = torch.zeros(triton.cdiv(n_out, 64), dtype=torch.int32, device=weight.device)
    n_bytes = weight.numel() * weight.element_size()
    products().register(weight, bias)
    return LinearWeight(Packed(weight, done), (n_out, n_in), weight.dtype, bias, n_bytes)


def cut_linear(w: LinearWeight, outputs: slice) -> LinearWeight | None:
    """Contract: ops/fp8_linear.py. The view shares the counters: the two may not run side by side."""
    if isinstance(w.data, PackedFp8):
        return fp8_linear.cut_linear(w, outputs)
    weight = w.data.weight[outputs]
    bias = None if w.bias is None else w.bias[outputs]
    n_bytes = weight.numel() * weight.element_size()
    return LinearWeight(Packed(weight, w.data.done), (weight.shape[0], w.shape[1]), w.dtype, bias, n_bytes)


def linear(x: Tensor | NormRows, w: LinearWeight) -> Tensor:
    """Contract: ops/linear.py. Not batch-invariant: the number of rows decides how K is cut."""
    if isinstance(w.data, PackedFp8):
        return fp8_linear.linear(x, w)
    rows, factor = without_factor(x)
    if rows.shape[0] > STREAM_ROWS or not can_stream(rows, w):
        return products().multiply(rows, w.data.weight, w.bias)
    n_out, n_in = w.shape
    tiles = tiles_for(rows.shape[0], n_out, n_in)
    return stream(rows, w.data.weight, w.bias, w.data.done, tiles, End(factor=factor))


def gated_linear(x: Tensor | NormRows, w: LinearWeight) -> Tensor:
    """silu_mul(linear(x, w)): x [T, K], w [2 I, K] (gate first, then up) -> [T, I]. Not batch-invariant, as ``linear``."""
    if isinstance(w.data, PackedFp8):
        return fp8_linear.gated_linear(x, w)
    rows, factor = without_factor(x)
    if rows.shape[0] > STREAM_ROWS or not can_stream(rows, w):
        return silu_mul(linear(x, w))
    tiles = gated_tiles_for(rows.shape[0])
    return stream(rows, w.data.weight, w.bias, w.data.done, tiles, End(gate=True, factor=factor))


def linear_add_rms_norm(
    x: Tensor, w: LinearWeight, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor | NormRows, Tensor]:
    """add_rms_norm(linear(x, w), residual, weight, eps). Few rows are one kernel, which leaves out the rounding before the norm's weight, and
    the row's factor to the products that take the rows."""
    if isinstance(w.data, PackedFp8):
        return fp8_linear.linear_add_rms_norm(x, w, residual, weight, eps)
    n_rows = x.shape[0]
    if n_rows > MOST_ROWS or not can_stream(x, w):
        return add_rms_norm(linear(x, w), residual, weight, eps)
    tiles = tiles_for(n_rows, *w.shape)
    residual = residual.contiguous()
    join = join_of(residual, weight, n_rows, tiles.outputs)
    rows = stream(x, w.data.weight, w.bias, w.data.done, tiles, End(join=join))
    return NormRows(rows, Factor(join.squares, eps)), residual


def linear_exact(x: Tensor, w: LinearWeight) -> Tensor:
    """Contract: ops/linear.py. Batch-invariant: K is never cut, and the order of its sum depends on no tile size."""
    if isinstance(w.data, PackedFp8):
        return fp8_linear.linear_exact(x, w)
    if not can_stream(x, w):
        raise ValueError(
            f"batch-invariant linear needs bf16 and K a multiple of 8, got {w.dtype} and K {w.shape[1]}"
        )
    return stream(x, w.data.weight, w.bias, w.data.done, exact_tiles_for(x.shape[0], w.shape[0]))


def gated_linear_exact(x: Tensor, w: LinearWeight) -> Tensor:
    """silu_mul(linear_exact(x, w)) with the same bits."""
    if isinstance(w.data, PackedFp8):
        return fp8_linear.gated_linear_exact(x, w)
    if not can_stream(x, w):
        return silu_mul(linear_exact(x, w))
    return stream(x, w.data.weight, w.bias, w.data.done, gated_tiles_for(x.shape[0]), End(gate=True))


def can_stream(x: Tensor, w: LinearWeight) -> bool:
    """Whether the streaming kernel takes this product."""
    return x.shape[0] > 0 and w.dtype == torch.bfloat16 and w.shape[1] % 8 == 0 and can_overlap()


def tiles_for(n_rows: int, n_out: int, n_in: int) -> Tiles:
    """Measured on H200 at 1, 8, 16, 64 rows of the 8B shapes. K is cut in two where it is long and there are few outputs."""
    rows = max(8, triton.next_power_of_2(n_rows))
    cuts = 2 if n_out <= 4096 and n_in >= 8192 else 1
    if n_out >= 16384:
        return _ring(128 if rows == 64 else 64, rows, 128, 4 if rows == 64 else 5, 1)
    return _ring(64, rows, 256 if rows <= 16 and n_out <= 4096 else 128, 16, cuts)


def gated_tiles_for(n_rows: int) -> Tiles:
    """Tiles of 64 gates and the 64 ups that go with them."""
    rows = min(256, max(8, triton.next_power_of_2(n_rows)))
    if rows <= 16:
        return _ring(64, rows, 256, 3, 1, gated=True)
    return _ring(64, rows, 64, 4, 1, gated=True)


def exact_tiles_for(n_rows: int, n_out: int) -> Tiles:
    """Tiles change nothing in the bits, so each size takes what measured best; up to 256 rows few outputs need small tiles."""
    rows = min(256, max(8, triton.next_power_of_2(n_rows)))
    if rows == 256:
        if n_rows > 256 or n_out >= 16384:
            return Tiles(128, 256, 64, 4, 8, 1)
        return Tiles(64, 256, 64, 5, 4, 1) if n_out > 4096 else Tiles(64, 128, 64, 8, 4, 1)
    return _ring(128 if n_out >= 16384 and rows == 64 else 64, rows, 64 if rows == 128 else 128, 16, 1)


def _ring(outputs: int, rows: int, inner: int, stages: int, cuts: int, *, gated: bool = False) -> Tiles:
    """As many stages as fit, at most ``stages``; 8 warps where the accumulators of 256 rows need them."""
    stage_bytes = ((2 if gated else 1) * outputs + rows) * inner * 2
    return Tiles(outputs, rows, inner, min(stages, RING_BYTES // stage_bytes), 8 if rows == 256 else 4, cuts)
