"""rms_norm and add_rms_norm: one program a row, the row stays in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kilat.ops.triton.fp8_rows import Fp8Rows, empty_rows, store_rows
from kilat.ops.triton.launch import can_overlap, let_next_start, wait_for_previous


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Contract: ops/rms_norm.py. Batch-invariant: a row is reduced by one program whose shape depends on H alone."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, None, weight, out, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Contract: ops/rms_norm.py. ``residual`` is updated in place; the norm sees the sum as it was rounded."""
    x, residual = x.contiguous(), residual.contiguous()
    out = torch.empty_like(x)
    _launch(x, residual, weight, out, eps)
    return out, residual


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    """quantize_rows(rms_norm(x)), to the bit."""
    x = x.contiguous()
    out = empty_rows(x.shape[0], x.shape[1], x.device)
    _launch(x, None, weight, out, eps)
    return out


def add_rms_norm_fp8(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Fp8Rows, Tensor]:
    """quantize_rows(add_rms_norm(x, residual)), to the bit, and the residual."""
    x, residual = x.contiguous(), residual.contiguous()
    out = empty_rows(x.shape[0], x.shape[1], x.device)
    _launch(x, residual, weight, out, eps)
    return out, residual


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor | Fp8Rows, eps: float) -> None:
    n_rows, hidden = x.shape
    if n_rows == 0:
        return
    block = max(128, triton.next_power_of_2(hidden))
    pdl = can_overlap()
    data, scale, stride = (
        (out.data, out.scale, out.scale.stride(0)) if isinstance(out, Fp8Rows) else (out, None, 0)
    )
    _rms_norm[(n_rows,)](
        x, residual, weight, data, scale, stride, eps, hidden,
        BLOCK=block, ADD=residual is not None, PDL=pdl,
        num_warps=min(16, max(1, block // 512)), launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["scale_stride"])
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scale_ptr, scale_stride, eps, hidden,
    BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * hidden + at, mask=inside, other=0.0)
    if ADD:
        old = tl.load(residual_ptr + row * hidden + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + old.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row * hidden + at, x, mask=inside)
    f = x.to(tl.float32)
    f = f * tl.rsqrt(tl.sum(f * f, 0) / hidden + eps)
    y = (f.to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
    if scale_ptr is not None:
        store_rows(y, out_ptr, scale_ptr, row, 0, hidden, scale_stride, BLOCK // 128)
    else:
        tl.store(out_ptr + row * hidden + at, y, mask=inside)
