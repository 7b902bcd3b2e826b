"""linear: y = x W^T + b, the weight packed once at load into whatever layout the kernel set wants."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TILE_ROWS = 16


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight as one kernel set packed it. ``data`` is private to that set. ``shape`` is (N outputs, K inputs); ``bias`` [N] or None."""

    data: Any
    shape: tuple[int, int]
    dtype: torch.dtype
    bias: Tensor | None
    n_bytes: int


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight [N, K] as GGUF stores it: ``data`` [N, bytes of a row] uint8, a row being whole blocks of ``ggml_type``."""

    data: Tensor
    ggml_type: int
    shape: tuple[int, int]


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
    """weight [N, K], bias [N] or None; both bf16 or fp32 of one dtype. Takes ownership; the reference keeps the tensor as it is."""
    n_bytes = weight.numel() * weight.element_size()
    return LinearWeight(weight.contiguous(), (weight.shape[0], weight.shape[1]), weight.dtype, bias, n_bytes)


def linear(x: Tensor, w: LinearWeight) -> Tensor:
    """x [T, K] -> [T, N], same dtype, fp32 accumulation.

    Batch-invariant: stock matrix products change a row's bits with the number of rows, so the reference always multiplies blocks of
    16 rows, the last one padded with zeros (reported for MKL and oneDNN; the same shape takes the same path).
    """
    weight: Tensor = w.data
    n_tokens = x.shape[0]
    out = x.new_empty(n_tokens, w.shape[0])
    for first in range(0, n_tokens, TILE_ROWS):
        block = x[first : first + TILE_ROWS]
        n = block.shape[0]
        tile = x.new_zeros(TILE_ROWS, x.shape[1])
        tile[:n] = block
        y = tile @ weight.t()
        out[first : first + n] = y[:n]
    if w.bias is not None:
        out += w.bias
    return out
