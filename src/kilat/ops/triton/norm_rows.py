"""Rows between a norm and the products that take them: the factor of a row is known only when the kernel that makes the rows has ended.

A product that ends in the residual adds it, multiplies by the norm's weight and leaves the sum of squares of its tile; the products that
follow add those up and scale their sums. That is one kernel less for each norm, and so some 3 us: the time of few rows is that of a chain
of kernels.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kilat.ops.triton.fp8_rows import Fp8Rows


@dataclass(frozen=True, slots=True)
class Factor:
    """1 / sqrt(sum over ``squares`` / H + eps) of each row: ``squares`` [tiles, T] fp32."""

    squares: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Join:
    """Where a product's result goes: ``residual`` [T, H] bf16, updated in place, ``weight`` [H] of the norm after it, and ``squares``
    [tiles, T] fp32 to write."""

    residual: Tensor
    weight: Tensor
    squares: Tensor


@dataclass(frozen=True, slots=True)
class NormRows:
    """Rows [T, H] that still lack their ``factor``; the streaming products take them, and nothing else does."""

    rows: Tensor | Fp8Rows
    factor: Factor


@dataclass(frozen=True, slots=True)
class End:
    """What a streaming product does with its sums: scales them by the ``factor`` of x's rows, makes silu(first half of the outputs) * second
    half of them (``gate``), adds them to the residual and gives the sum times the norm's weight (``join``), gives it in e4m3 (``quantize``)."""

    gate: bool = False
    quantize: bool = False
    factor: Factor | None = None
    join: Join | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of the kernels: residual, norm's weight, sums of squares (written or read), how many, epsilon."""
        join, factor = self.join, self.factor
        if join is not None:
            return join.residual, join.weight, join.squares, 0, 0.0
        return (
            (None, None, factor.squares, len(factor.squares), factor.eps)
            if factor
            else (None, None, None, 0, 0.0)
        )

    @property
    def squares(self) -> int:
        """Sums of squares that a kernel reads at once, a power of two."""
        return triton.next_power_of_2(len(self.factor.squares)) if self.factor else 0


PLAIN = End()
MOST_ROWS = 8
"""With more, what the norm adds to the end of a product takes longer than its own kernel. Steps of the 8B shapes on an H200 with 1 / 8 / 16 or
64 rows: FP8 2.56 / 2.85 / 3.19 ms against 2.60 / 2.95 / 3.08, bf16 3.85 / 4.15 / 5.62 against 3.90 / 4.23 / 5.46."""


def join_of(residual: Tensor, weight: Tensor, n_rows: int, outputs: int) -> Join:
    """For a product with tiles of ``outputs``."""
    tiles = triton.cdiv(len(weight), outputs)
    return Join(residual, weight, torch.empty(tiles, n_rows, dtype=torch.float32, device=residual.device))


def without_factor(x: Tensor | Fp8Rows | NormRows) -> tuple[Any, Factor | None]:
    """The rows alone, and their factor."""
    return (x.rows, x.factor) if isinstance(x, NormRows) else (x, None)
