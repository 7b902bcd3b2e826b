"""The tokens whose logits are wanted: all that the last layer computes beyond K and V."""

import torch

from kilat.ops.batch import StepBatch

LEAST_TOKENS = 512
"""With fewer, reading the last layer's weights takes about as long as its products, and the kernels in between cost what is saved."""
LEAST_SHARE = 8
MOST_PER_ROW = 4
"""On average over the rows: every wanted token reads all its keys alone, where a chunk's tokens share them."""


def pays(batch: StepBatch) -> bool:
    """Whether so few tokens are wanted that computing them apart takes less time; known from shapes alone."""
    if batch.logits_at is None:
        return False
    n_tokens, n_wanted = len(batch.token_ids), len(batch.logits_at)
    few = n_wanted <= MOST_PER_ROW * len(batch.kv_len)
    return n_tokens >= LEAST_TOKENS and n_wanted * LEAST_SHARE <= n_tokens and few


def wanted_rows(batch: StepBatch) -> StepBatch:
    """The tokens at ``logits_at`` as rows of one token each, in their order, with the pages of the rows they come from. Waits for nothing."""
    at = batch.logits_at
    assert at is not None
    # a token's row is the number of rows that end at or before it, rows of no tokens among them
    row = torch.searchsorted(batch.row_start[1:], at, right=True, out_int32=True)
    positions = batch.positions[at]
    return StepBatch(
        token_ids=batch.token_ids[at],
        positions=positions,
        row_start=torch.arange(len(at) + 1, dtype=torch.int32, device=at.device),
        kv_len=positions + 1,
        page_table=batch.page_table[row],
        slots=batch.slots[at],
        logits_at=None,
        page_tokens=batch.page_tokens,
        max_kv_len=batch.max_kv_len,
        max_q_len=1,
    )
