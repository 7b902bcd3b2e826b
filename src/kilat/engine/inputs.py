"""From the rows of a plan to the tensors of a step."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kilat.ops.batch import StepBatch
from kilat.policy.sched.plan import PENDING, Row


def build_batch(
    rows: Sequence[Row], page_tokens: int, device: torch.device, sampled: Mapping[str, int] | None = None
) -> StepBatch:
    """The StepBatch of ``rows`` in their order. ``sampled`` gives the last sampled id of sessions whose row is PENDING.

    ``logits_at`` lists, row after row, the last token of every row that samples, or all tokens of a row that wants prompt
    log-probabilities. O(tokens + pages) host work in numpy; one copy per tensor to the device.
    """
    n_rows = len(rows)
    counts = np.fromiter((len(r.token_ids) for r in rows), np.int32, n_rows)
    starts = np.fromiter((r.start for r in rows), np.int32, n_rows)
    row_start = np.zeros(n_rows + 1, np.int32)
    np.cumsum(counts, out=row_start[1:])
    n_tokens = int(row_start[-1])
    kv_len = starts + counts
    ids = np.empty(n_tokens, np.int32)
    table = np.zeros((n_rows, max(len(r.pages) for r in rows)), np.int32)
    wanted: list[int] = []
    at = 0
    for i, r in enumerate(rows):
        n = len(r.token_ids)
        ids[at : at + n] = r.token_ids
        if r.token_ids[-1] == PENDING:
            assert sampled is not None
            ids[at + n - 1] = sampled[r.session_id]
        table[i, : len(r.pages)] = r.pages
        if r.prompt_logprobs:
            wanted.extend(range(at, at + n))
        elif r.sample:
            wanted.append(at + n - 1)
        at += n
    within = np.arange(n_tokens, dtype=np.int32) - np.repeat(row_start[:-1], counts)
    positions = np.repeat(starts, counts) + within
    row_of = np.repeat(np.arange(n_rows, dtype=np.int32), counts)
    slots = table[row_of, positions // page_tokens] * page_tokens + positions % page_tokens

    def put(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, np.int32)).to(device)

    return StepBatch(
        token_ids=put(ids),
        positions=put(positions),
        row_start=put(row_start),
        kv_len=put(kv_len),
        page_table=put(table),
        slots=put(slots),
        logits_at=put(np.asarray(wanted, np.int32)),
        page_tokens=page_tokens,
        max_kv_len=int(kv_len.max()),
        max_q_len=int(counts.max()),
    )
