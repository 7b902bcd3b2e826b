"""Activations in e4m3 with a scale per row and group of 128: what the FP8 products take, made by one pass or by the kernel before."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kilat.ops.fp8_linear import BLOCK, FP8
from kilat.ops.triton.launch import can_overlap, let_next_start, wait_for_previous

GROUPS_PER_PROGRAM = 16
SMALLEST: tl.constexpr = tl.constexpr(1.1754943508222875e-38)


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """``n_rows`` rows in ``data`` [T, K] e4m3 with ``scale`` [ceil(K / 128), T] fp32, a group's rows side by side.

    T is ``n_rows`` made a multiple of 4: the library's product wants the scales of a group to begin at 16 bytes. Rows past ``n_rows``
    hold anything.
    """

    data: Tensor
    scale: Tensor
    n_rows: int


def empty_rows(n_rows: int, n_in: int, device: torch.device) -> Fp8Rows:
    """Room for quantized rows."""
    padded = (n_rows + 3) // 4 * 4
    data = torch.empty(padded, n_in, dtype=FP8, device=device)
    scale = torch.empty(triton.cdiv(n_in, BLOCK), padded, dtype=torch.float32, device=device)
    return Fp8Rows(data, scale, n_rows)


def quantize_rows(x: Tensor) -> Fp8Rows:
    """Contract: ops/fp8_linear.py, with the scales transposed. Batch-invariant: a group is handled alone."""
    x = x.contiguous()
    n_rows, n_in = x.shape
    out = empty_rows(n_rows, n_in, x.device)
    if n_rows:
        pdl = can_overlap()
        grid = (n_rows, triton.cdiv(n_in, BLOCK * GROUPS_PER_PROGRAM))
        _quantize_rows[grid](
            x, out.data, out.scale, n_in, out.scale.stride(0), G=GROUPS_PER_PROGRAM, PDL=pdl, num_warps=4, launch_pdl=pdl
        )  # fmt: skip
    return out


@triton.jit
def group_scale(top):
    """The scale of groups whose largest magnitudes are ``top``; divisions are rounded to nearest, as the reference's are."""
    return tl.maximum(tl.math.div_rn(top, tl.full(top.shape, 448.0, tl.float32)), SMALLEST)


@triton.jit
def to_fp8(y, scale):
    """y fp32 over ``scale``, in e4m3."""
    return tl.math.div_rn(y, scale + tl.zeros_like(y)).to(tl.float8e4nv)


@triton.jit
def store_rows(y, data_ptr, scale_ptr, row, first_group, n_in, scale_stride, G: tl.constexpr):
    """Quantizes y [G * 128] (0 past the row's end), values ``first_group * 128 ...`` of ``row``."""
    y = tl.reshape(y.to(tl.float32), (G, 128))
    g = first_group + tl.arange(0, G)
    scale = group_scale(tl.max(tl.abs(y), 1))
    at = g[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(scale_ptr + g * scale_stride + row, scale, mask=g * 128 < n_in)
    tl.store(data_ptr + row * n_in + at, to_fp8(y, scale[:, None]), mask=at < n_in)


@triton.jit(do_not_specialize=["scale_stride"])
def _quantize_rows(x_ptr, data_ptr, scale_ptr, n_in, scale_stride, G: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * G * 128 + tl.arange(0, G * 128)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * n_in + at, mask=at < n_in, other=0.0)
    store_rows(x, data_ptr, scale_ptr, row, tl.program_id(1) * G, n_in, scale_stride, G)
