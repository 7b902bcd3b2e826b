"""attention: rows with few tokens go to attention_decode (or attention_exact), longer chunks to attention_prefill."""

from dataclasses import replace

import torch
import triton
from torch import Tensor

from kilat.ops.batch import StepBatch
from kilat.ops.cuda import attention_decode as hopper
from kilat.ops.fp8_linear import BLOCK
from kilat.ops.rope_write import KvScale
from kilat.ops.triton.attention_blocks import block_rows, can_take
from kilat.ops.triton.attention_call import Call
from kilat.ops.triton.attention_decode import decode_rows
from kilat.ops.triton.attention_exact import decode_rows_exact
from kilat.ops.triton.attention_prefill import prefill_rows
from kilat.ops.triton.fp8_rows import Fp8Rows, empty_rows, quantize_rows

MOST_ROWS_TIMES_HEADS = 1 << 18


class Attention:
    """Contract: ops/attention.py, without ``kv_scale``. One call at a time: it owns the counters by which who finishes a head last knows that it is the last.

    ``exact``: batch- and chunk-invariant. Both kernels then cut the keys of a row at the same positions (multiples of EXACT_CUT), merge the
    cuts in order, and use the same tile and matrix instruction, so that a token's result has the same bits in a chunk of any size and in a
    batch of any size. Otherwise a row's cuts depend on the other rows.
    """

    def __init__(self, device: torch.device, *, exact: bool) -> None:
        self.exact = exact
        self.done = torch.zeros(MOST_ROWS_TIMES_HEADS, dtype=torch.int32, device=device)

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        batch: StepBatch,
        *,
        scale: float,
        window: int = 0,
        kv_scale: KvScale | None = None,
    ) -> Tensor:
        return self._run(self._call(q, kv, batch, scale, window, kv_scale)).out.view(q.shape[0], -1)

    def quantized(
        self,
        q: Tensor,
        kv: Tensor,
        batch: StepBatch,
        *,
        scale: float,
        window: int = 0,
        kv_scale: KvScale | None = None,
    ) -> Fp8Rows:
        """quantize_rows of the result, to the bit; by the kernel itself where every row decodes and a head is a group."""
        n_tokens, n_q, dim = q.shape
        call = self._call(q, kv, batch, scale, window, kv_scale)
        if self.exact or dim != BLOCK or batch.max_q_len > call.few:
            return quantize_rows(self._run(call).out.view(n_tokens, -1))
        rows = empty_rows(n_tokens, n_q * dim, q.device)
        self._run(replace(call, out=rows.data[:n_tokens].view(n_tokens, n_q, dim), out_scale=rows.scale))
        return rows

    def _call(
        self, q: Tensor, kv: Tensor, batch: StepBatch, scale: float, window: int, kv_scale: KvScale | None
    ) -> Call:
        q = q.contiguous()
        group_pad = triton.next_power_of_2(q.shape[1] // kv.shape[3])
        few = max(1, 16 // group_pad)
        if self._on_hopper(q, kv, batch, window):
            few = hopper.few_tokens(q.shape[1] // kv.shape[3])
        few = min(few, batch.max_q_len)
        return Call(q, kv, torch.empty_like(q), batch, scale, window, few, self.exact, kv_scale)

    def _run(self, call: Call) -> Call:
        q, batch = call.q, call.batch
        assert len(batch.kv_len) * call.n_kv <= MOST_ROWS_TIMES_HEADS
        if q.shape[0] > 0:
            if self._on_hopper(q, call.kv, batch, call.window):
                hopper.decode_rows(call, self.done)
            else:
                (decode_rows_exact if self.exact else decode_rows)(call, self.done)
            if batch.max_q_len > call.few:
                (block_rows if can_take(call) else prefill_rows)(call)
        return call

    def _on_hopper(self, q: Tensor, kv: Tensor, batch: StepBatch, window: int) -> bool:
        return not self.exact and hopper.takes(q, kv, len(batch.kv_len), batch.page_tokens, window)
