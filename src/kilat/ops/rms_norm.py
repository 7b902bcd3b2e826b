"""rms_norm and its fusion with the residual add that always precedes it."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H], weight [H] -> [T, H] of x's dtype: x / sqrt(mean(x^2) + eps) in fp32, rounded, then times weight (arXiv:1910.07467).

    The rounding before the product with the weight is what transformers does; it matters in bf16.
    """
    f = x.float()
    f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
    return f.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [T, H] -> (rms_norm(x + residual), x + residual). ``residual`` may be updated in place and returned."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual
