"""From the rows of a plan to the tensors of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kilat.ops.batch import StepBatch
from kilat.policy.sched.plan import PENDING, Row

Int32 = np.ndarray


@dataclass(frozen=True, slots=True)
class HostBatch:
    """The fields of a StepBatch as int32 numpy arrays; ``token_ids`` may hold PENDING as the last id of a row."""

    token_ids: Int32
    positions: Int32
    row_start: Int32
    kv_len: Int32
    page_table: Int32
    slots: Int32
    logits_at: Int32
    max_q_len: int

    def to(self, device: torch.device, page_tokens: int) -> StepBatch:
        """The same on ``device``; one copy per tensor."""

        def put(x: Int32) -> torch.Tensor:
            return torch.from_numpy(x).to(device)

        return StepBatch(
            token_ids=put(self.token_ids),
            positions=put(self.positions),
            row_start=put(self.row_start),
            kv_len=put(self.kv_len),
            page_table=put(self.page_table),
            slots=put(self.slots),
            logits_at=put(self.logits_at),
            page_tokens=page_tokens,
            max_kv_len=int(self.kv_len.max()),
            max_q_len=self.max_q_len,
        )


def host_batch(rows: Sequence[Row], page_tokens: int) -> HostBatch:
    """The batch of ``rows`` in their order. O(tokens + pages) work in numpy.

    ``logits_at`` lists, row after row, the last token of every row that samples, or all tokens of a row that wants prompt
    log-probabilities.
    """
    n_rows = len(rows)
    counts = np.fromiter((len(r.token_ids) for r in rows), np.int32, n_rows)
    starts = np.fromiter((r.start for r in rows), np.int32, n_rows)
    row_start = np.zeros(n_rows + 1, np.int32)
    np.cumsum(counts, out=row_start[1:])
    n_tokens = int(row_start[-1])
    ids = np.empty(n_tokens, np.int32)
    table = np.zeros((n_rows, max(len(r.pages) for r in rows)), np.int32)
    wanted: list[int] = []
    at = 0
    for i, r in enumerate(rows):
        n = len(r.token_ids)
        ids[at : at + n] = r.token_ids
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
    return HostBatch(
        token_ids=ids,
        positions=positions,
        row_start=row_start,
        kv_len=starts + counts,
        page_table=table,
        slots=slots,
        logits_at=np.asarray(wanted, np.int32),
        max_q_len=int(counts.max()),
    )


def build_batch(
    rows: Sequence[Row],
    page_tokens: int,
    device: torch.device,
    sampled: Mapping[str, int] | None = None,
) -> StepBatch:
    """The StepBatch of ``rows`` on ``device``. ``sampled`` gives the last sampled id of sessions whose row is PENDING; a session that is
    not there failed in the step before, its row will be dropped, and any id serves."""
    batch = host_batch(rows, page_tokens)
    if sampled is not None:
        for i in np.flatnonzero(batch.token_ids == PENDING):
            row = int(np.searchsorted(batch.row_start, i, side="right")) - 1
            batch.token_ids[i] = sampled.get(rows[row].session_id, 0)
    return batch.to(device, page_tokens)
