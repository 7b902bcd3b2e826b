"""Turns the block formats of GGUF files into float tensors, with the ``gguf`` package's numpy code as the reference."""

from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from kilat.base.errors import ModelFileError
from kilat.base.gguf_header import GGML_TYPES
from kilat.ops.linear import BlockWeight

__all__ = ["BlockWeight", "cut_columns", "dequantize_into", "require_supported"]

# ggml type -> dtype, for the formats that are an array of numbers.
_PLAIN: Final = MappingProxyType({0: torch.float32, 1: torch.float16, 30: torch.bfloat16})
_BLOCKS: Final = frozenset({2, 3, 6, 7, 8, 12, 13, 14})
# Values per step: the numpy temporaries of a step (about 20 bytes a value) stay in the processor's cache.
_STEP_ITEMS: Final = 1 << 16
# torch wakes its thread pool above this size, which costs more than such a copy.
_COPY_ITEMS: Final = 1 << 15


def require_supported(ggml_type: int, tensor_name: str) -> None:
    """Raise ModelFileError when a tensor is stored in a format that :func:`dequantize_into` cannot read."""
    if ggml_type not in _PLAIN and ggml_type not in _BLOCKS:
        supported = ", ".join(GGML_TYPES[t].name for t in sorted({*_PLAIN, *_BLOCKS}))
        known = GGML_TYPES.get(ggml_type)
        raise ModelFileError(
            f"tensor {tensor_name!r} is stored as {known.name if known else ggml_type}; supported: {supported}. "
            "Use another quantization of this model"
        )


def dequantize_into(out: Tensor, raw: memoryview, ggml_type: int) -> None:
    """Write the values of the whole blocks in ``raw`` (writable bytes, not kept) to ``out``, 1-D contiguous, any float dtype.

    Values are the format's exact fp32 values, rounded once to ``out``'s dtype. Temporary memory does not depend on the size.
    Raises ModelFileError when the type is not supported or the two sizes do not fit.
    """
    require_supported(ggml_type, "given")
    kind = GGML_TYPES[ggml_type]
    if len(raw) % kind.block_bytes or out.numel() != len(raw) // kind.block_bytes * kind.block_items:
        raise ModelFileError(
            f"{len(raw)} bytes of {kind.name} do not hold {out.numel()} values: the file is damaged"
        )
    if ggml_type in _PLAIN:
        out.copy_(torch.frombuffer(raw, dtype=_PLAIN[ggml_type]))
        return
    data = np.frombuffer(raw, np.uint8)
    step_bytes = _STEP_ITEMS // kind.block_items * kind.block_bytes
    done = 0
    # Scales of a damaged file may be infinite or NaN; that is for the reader of the values to see, not a warning.
    with np.errstate(all="ignore"):
        for begin in range(0, len(data), step_bytes):
            blocks = data[begin : begin + step_bytes].reshape(1, -1)
            values = torch.from_numpy(dequantize(blocks, GGMLQuantizationType(ggml_type)).reshape(-1))
            for part in values.split(_COPY_ITEMS):
                out[done : done + len(part)].copy_(part)
                done += len(part)


def cut_columns(w: BlockWeight, share: slice) -> BlockWeight | None:
    """Inputs ``share`` of ``w`` with their blocks as they are; None where a block would be cut."""
    kind = GGML_TYPES[w.ggml_type]
    if share.start % kind.block_items or share.stop % kind.block_items:
        return None
    first, last = (at // kind.block_items * kind.block_bytes for at in (share.start, share.stop))
    return BlockWeight(w.data[:, first:last], w.ggml_type, (w.shape[0], share.stop - share.start))
