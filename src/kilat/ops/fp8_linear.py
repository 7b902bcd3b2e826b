"""fp8_linear: y = x W^T + b with W in e4m3 blocks of 128 x 128 and x in e4m3 groups of 128, each with an fp32 scale.

The format of DeepSeek-V3's checkpoints (arXiv:2412.19437, section 3.3). A value is its e4m3 number times the scale of its block; the
number is value / scale in fp32, rounded to nearest even. Blocks at the edges of a matrix are smaller where 128 does not divide it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kilat.ops import linear as plain
from kilat.ops.linear import LinearWeight

BLOCK = 128
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""No scale is below this: a subnormal one could be flushed to 0 on a device, and the values divided by it with it."""


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """``data`` [N, K] e4m3, contiguous; ``scale`` [ceil(N / 128), ceil(K / 128)] fp32: weight = data * scale of its block."""

    data: Tensor
    scale: Tensor

    @property
    def n_bytes(self) -> int:
        return self.data.numel() + self.scale.numel() * self.scale.element_size()


def quantize_weight(weight: Tensor) -> Fp8Weight:
    """weight [N, K], any float dtype -> its FP8 blocks. A scale is the block's largest magnitude / 448; of a block of zeros 1.

    A block that holds a NaN or an infinity becomes NaN throughout or in part: a broken weight stays visible.
    """
    n_out, n_in = weight.shape
    padded = F.pad(weight.float(), (0, -n_in % BLOCK, 0, -n_out % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    top = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(top == 0, 1.0, _scale(top))
    data = _to_fp8(blocks / scale[:, None, :, None]).view(padded.shape)
    return Fp8Weight(data[:n_out, :n_in].contiguous(), scale)


def dequantize(w: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in ``dtype``: the products in fp32, rounded once."""
    n_out, n_in = w.data.shape
    rows = w.scale.repeat_interleave(BLOCK, 0)[:n_out]
    out = torch.empty(n_out, n_in, dtype=dtype, device=w.data.device)
    for i, first in enumerate(range(0, n_in, BLOCK)):
        part = slice(first, first + BLOCK)
        out[:, part] = w.data[:, part].float() * rows[:, i : i + 1]
    return out


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> (e4m3 [T, K], scale fp32 [T, ceil(K / 128)]): groups of 128 values of a row share a scale, their largest magnitude / 448.

    A group of zeros has the smallest scale, never 0. A NaN or an infinity makes its group's scale, and so the row's products, NaN.
    """
    n_rows, n_in = x.shape
    groups = F.pad(x.float(), (0, -n_in % BLOCK)).view(n_rows, -(-n_in // BLOCK), BLOCK)
    top = groups.abs().amax(-1)
    scale = _scale(top)
    data = _to_fp8(groups / scale[..., None]).view(n_rows, -1)[:, :n_in]
    return data.contiguous(), scale


def _scale(top: Tensor) -> Tensor:
    # by a tensor, not by a number: devices divide by a number through its reciprocal, whose last bit differs
    return (top / torch.full_like(top, FP8_MAX)).clamp_min(SMALLEST_SCALE)


def _to_fp8(x: Tensor) -> Tensor:
    # e4m3 has no infinity: without the clamp, a quotient that rounding put above 448 could become NaN
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def pack_fp8(w: Fp8Weight, bias: Tensor | None = None) -> LinearWeight:
    """FP8 blocks and a bias [N] or None for the ``linear`` of a set; takes ownership. The reference keeps the tensors as they are.

    ``dtype`` of the result is e4m3; activations and outputs of the product keep their own.
    """
    return LinearWeight(w, (w.data.shape[0], w.data.shape[1]), FP8, bias, w.n_bytes)


def cut_linear(w: LinearWeight, outputs: slice) -> LinearWeight | None:
    """Outputs ``start`` .. ``stop`` - 1 of a packed weight as a weight of its own, a view of it; None where its layout has no such view.

    FP8: None where the outputs begin or end inside a block of 128.
    """
    bias = None if w.bias is None else w.bias[outputs]
    if not isinstance(w.data, Fp8Weight):
        return plain.pack_linear(w.data[outputs], bias)
    blocks = whole_blocks(outputs, w.shape[0])
    return None if blocks is None else pack_fp8(Fp8Weight(w.data.data[outputs], w.data.scale[blocks]), bias)


def whole_blocks(outputs: slice, n_out: int) -> slice | None:
    """The blocks of 128 that ``outputs`` of ``n_out`` are; None where they cut one."""
    if outputs.start % BLOCK or (outputs.stop % BLOCK and outputs.stop != n_out):
        return None
    return slice(outputs.start // BLOCK, -(-outputs.stop // BLOCK))


def linear(x: Tensor, w: LinearWeight) -> Tensor:
    """x [T, K] -> [T, N], same dtype, for either kind of weight (:func:`pack_fp8` or ``linear.pack_linear``).

    FP8: x is quantized by :func:`quantize_rows`; a block's products are summed in fp32, times both scales, the blocks and the bias
    added in fp32, rounded once to x's dtype. A set may keep x as it is (:func:`linear_wide`, which is more exact) for some or all
    numbers of rows, and says so; one that promises batch invariance does one or the other always.
    """
    if not isinstance(w.data, Fp8Weight):
        return plain.linear(x, w)
    data, scale = quantize_rows(x)
    return _product(data.float(), scale, w.data, w.bias).to(x.dtype)


def linear_wide(x: Tensor, w: LinearWeight) -> Tensor:
    """:func:`linear` of an FP8 weight with the activations kept as they are: x [T, K] -> [T, N], same dtype."""
    assert isinstance(w.data, Fp8Weight)
    ones = torch.ones(x.shape[0], w.data.scale.shape[1], device=x.device)
    return _product(x.float(), ones, w.data, w.bias).to(x.dtype)


def _product(x: Tensor, x_scale: Tensor, w: Fp8Weight, bias: Tensor | None) -> Tensor:
    """x [T, K] fp32 with scales [T, ceil(K / 128)] -> fp32 [T, N].

    Batch-invariant as ``linear.linear`` is: always blocks of 16 rows, the last one padded.
    """
    n_rows, n_in = x.shape
    pad = -n_rows % plain.TILE_ROWS
    x, x_scale = F.pad(x, (0, 0, 0, pad)), F.pad(x_scale, (0, 0, 0, pad))
    w_scale = w.scale.repeat_interleave(BLOCK, 0)[: w.data.shape[0]]
    out = x.new_zeros(x.shape[0], w.data.shape[0])
    for i, first in enumerate(range(0, n_in, BLOCK)):
        inner = slice(first, first + BLOCK)
        block = w.data[:, inner].float().t()
        for row in range(0, x.shape[0], plain.TILE_ROWS):
            rows = slice(row, row + plain.TILE_ROWS)
            out[rows] += (x[rows, inner] @ block) * (x_scale[rows, i : i + 1] * w_scale[:, i])
    if bias is not None:
        out += bias.float()
    return out[:n_rows]
