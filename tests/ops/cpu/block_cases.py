"""Weights in GGUF's block formats, what their values are, and what the kernels make of rows of x."""

import numpy as np
import torch
from torch import Tensor

from kilat.base.gguf_header import GGML_TYPES
from kilat.ops.linear import BlockWeight
from kilat.quant.gguf_blocks import dequantize_into

# ggml type -> byte positions of the fp16 scales of a block
SCALES = {2: [0], 3: [0, 2], 6: [0], 7: [0, 2], 8: [0], 12: [0, 2], 13: [0, 2], 14: [208]}
TYPES = list(SCALES)
GROUP = 32


def type_name(ggml_type: int) -> str:
    return GGML_TYPES[ggml_type].name


def blocks(ggml_type: int, n: int, k: int, seed: int = 0) -> BlockWeight:
    """Random bytes, but for scales, which are about as large as real ones and of both signs."""
    kind = GGML_TYPES[ggml_type]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (n, k // kind.block_items, kind.block_bytes), dtype=np.uint8)
    for at in SCALES[ggml_type]:
        scale = rng.uniform(-0.01, 0.01, raw.shape[:2]).astype(np.float16)
        raw[..., at : at + 2] = scale.view(np.uint8).reshape(*raw.shape[:2], 2)
    return BlockWeight(torch.from_numpy(raw.reshape(n, -1)), ggml_type, (n, k))


def values(w: BlockWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """[N, K] by the reader of files."""
    out = torch.empty(w.shape[0] * w.shape[1], dtype=dtype)
    dequantize_into(out, memoryview(bytearray(w.data.contiguous().numpy().tobytes())), w.ggml_type)
    return out.view(w.shape)


def rounded(x: Tensor) -> Tensor:
    """x [T, K] as the header of the kernels says that products see it, in fp64."""
    groups = x.float().view(x.shape[0], -1, GROUP)
    top = groups.abs().amax(-1, keepdim=True)
    levels = torch.full_like(top, 127.0)  # a tensor, because number / tensor is not one division in torch
    q = torch.round(groups * (levels / top))
    q = torch.where(top < 1e-30, torch.zeros(()), q)
    return (q.double() * (top / levels).double()).view(x.shape)
