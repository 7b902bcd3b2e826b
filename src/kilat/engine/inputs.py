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
    max_kv_len: int
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
            max_kv_len=self.max_kv_len,
            max_q_len=self.max_q_len,
        )


def host_batch(rows: Sequence[Row], page_tokens: int) -> HostBatch:
    """The batch of ``rows`` in their order. O(tokens + pages) work.

    ``logits_at`` lists, row after row, the last token of every row that samples, or all tokens of a row that wants prompt
    log-probabilities.
    """
    # Lists first: after a forward pass the caches are cold and each numpy call costs ten times what it does in a loop.
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    kv_len: list[int] = []
    table: list[int] = []
    wanted: list[int] = []
    row_start = [0]
    width = max(len(r.pages) for r in rows)
    max_q_len = 0
    for r in rows:
        start, pages, n = r.start, r.pages, len(r.token_ids)
        at, end = len(ids), start + n
        ids += r.token_ids
        if n == 1:
            positions.append(start)
            slots.append(pages[start // page_tokens] * page_tokens + start % page_tokens)
        else:
            positions += range(start, end)
            for page in range(start // page_tokens, (end - 1) // page_tokens + 1):
                shift = (pages[page] - page) * page_tokens  # from a position on this page to its slot
                slots += range(
                    max(start, page * page_tokens) + shift, min(end, (page + 1) * page_tokens) + shift
                )
        kv_len.append(end)
        table += pages
        table += [0] * (width - len(pages))
        row_start.append(at + n)
        if r.prompt_logprobs:
            wanted += range(at, at + n)
        elif r.sample:
            wanted.append(at + n - 1)
        if n > max_q_len:
            max_q_len = n
    return HostBatch(
        token_ids=_ints(ids),
        positions=_ints(positions),
        row_start=_ints(row_start),
        kv_len=_ints(kv_len),
        page_table=_ints(table).reshape(len(rows), width),
        slots=_ints(slots),
        logits_at=_ints(wanted),
        max_kv_len=max(kv_len),
        max_q_len=max_q_len,
    )


def _ints(values: list[int]) -> Int32:
    return np.array(values, np.int32)


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
        for i, r in enumerate(rows):
            if r.token_ids[-1] == PENDING:
                batch.token_ids[batch.row_start[i + 1] - 1] = sampled.get(r.session_id, 0)
    return batch.to(device, page_tokens)
