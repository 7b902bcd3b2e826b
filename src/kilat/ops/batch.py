"""StepBatch: the tensors that describe one forward pass, shared by all layers."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """``T`` tokens of ``B`` rows, flattened row after row. All tensors int32, contiguous, on the model's device; read-only.

    token_ids  [T]
    positions  [T]      position of each token in its session
    row_start  [B + 1]  row b owns tokens row_start[b] .. row_start[b + 1] - 1
    kv_len     [B]      tokens of context of row b after this step (positions 0 .. kv_len - 1 are attended to)
    page_table [B, P]   page ids of row b; entries past ceil(kv_len / page_tokens) are arbitrary but valid page ids
    slots      [T]      where the token's K and V go: page * page_tokens + offset
    logits_at  [S]      indices into T of the tokens whose logits are wanted; None: of all, in their order
    page_tokens         tokens per page
    max_kv_len          upper bound of kv_len, known on the host; a captured graph serves every step under its bound
    max_q_len           upper bound of the tokens of a row, known on the host; 1 when every row decodes
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    row_start: torch.Tensor
    kv_len: torch.Tensor
    page_table: torch.Tensor
    slots: torch.Tensor
    logits_at: torch.Tensor | None
    page_tokens: int
    max_kv_len: int
    max_q_len: int
