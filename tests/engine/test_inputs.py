"""StepBatch says the same as the rows it was built from."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kilat.engine.inputs import build_batch
from kilat.policy.sched.plan import PENDING, Row

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")

row_shapes = st.tuples(st.integers(0, 40), st.integers(1, 12), st.booleans(), st.booleans())


@given(st.lists(row_shapes, min_size=1, max_size=6), st.sampled_from([1, 4, 16]))
def test_every_token_gets_its_position_and_its_slot(shapes, page_tokens):
    rows, used = [], 0
    for i, (start, n, sample, prompt) in enumerate(shapes):
        n_pages = -(-(start + n) // page_tokens)
        rows.append(
            Row(f"s{i}", start, list(range(100, 100 + n)), list(range(used, used + n_pages)), sample, prompt)
        )
        used += n_pages
    batch = build_batch(rows, page_tokens, CPU)
    at, wanted = 0, []
    for i, row in enumerate(rows):
        assert batch.row_start[i] == at
        assert batch.kv_len[i] == row.start + row.n_tokens
        for j, token in enumerate(row.token_ids):
            position = row.start + j
            assert batch.token_ids[at + j] == token
            assert batch.positions[at + j] == position
            assert (
                batch.slots[at + j]
                == row.pages[position // page_tokens] * page_tokens + position % page_tokens
            )
        if row.prompt_logprobs:
            wanted += range(at, at + row.n_tokens)
        elif row.sample:
            wanted.append(at + row.n_tokens - 1)
        at += row.n_tokens
    assert batch.logits_at.tolist() == wanted
    assert batch.row_start[-1] == at
    assert batch.max_kv_len == max(r.start + r.n_tokens for r in rows)
    assert len(set(batch.slots.tolist())) == at


def test_a_pending_token_is_the_last_one_its_session_sampled():
    rows = [Row("a", 5, [PENDING], [0, 1], True), Row("b", 0, [7], [2], True)]
    batch = build_batch(rows, 4, CPU, {"a": 42, "b": 9})
    assert batch.token_ids.tolist() == [42, 7]


def test_a_pending_token_of_a_session_that_failed_is_any_valid_id():
    batch = build_batch([Row("gone", 5, [PENDING], [0, 1], True)], 4, CPU, {})
    assert batch.token_ids.tolist() == [0]
