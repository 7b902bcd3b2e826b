"""attention: rows with few tokens go to the split kernel (attention_decode), longer chunks to the block kernel (attention_prefill).

With ``exact`` both kernels cut the keys of a row at the same positions (multiples of EXACT_SPLIT), merge the cuts in order, and use the
same tile and matrix instruction, so that a token's result has the same bits in a chunk of any size and in a batch of any size.
"""

import torch
import triton
from torch import Tensor

from kilat.ops.batch import StepBatch
from kilat.ops.triton.attention_decode import decode_rows
from kilat.ops.triton.attention_prefill import prefill_rows
from kilat.ops.triton.attention_tiles import Call


def attention(q: Tensor, kv: Tensor, batch: StepBatch, *, scale: float, window: int = 0) -> Tensor:
    """Contract: ops/attention.py. Not batch-invariant: cuts and tiles depend on the number of rows."""
    return _attention(q, kv, batch, scale, window, exact=False)


def attention_exact(q: Tensor, kv: Tensor, batch: StepBatch, *, scale: float, window: int = 0) -> Tensor:
    """Contract: ops/attention.py, batch- and chunk-invariant."""
    return _attention(q, kv, batch, scale, window, exact=True)


def _attention(q: Tensor, kv: Tensor, batch: StepBatch, scale: float, window: int, *, exact: bool) -> Tensor:
    q = q.contiguous()
    group_pad = triton.next_power_of_2(q.shape[1] // kv.shape[3])
    few = max(1, 16 // group_pad)
    call = Call(q, kv, torch.empty_like(q), batch, scale, window, few, exact)
    if q.shape[0] > 0:
        decode_rows(call)
        if batch.max_q_len > few:
            prefill_rows(call)
    return call.out.view(q.shape[0], -1)
