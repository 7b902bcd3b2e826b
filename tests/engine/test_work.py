"""What a step costs: counted one key and one weight at a time, and as the model counts it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.engine.kv_memory import page_layout
from kilat.engine.work import LayerWork, ModelWork, model_work
from kilat.policy.sched.plan import Row
from tests.engine.harness import tiny_model

pytestmark = pytest.mark.cpu


def row(start: int, n: int, *, sample: bool = True, prompt_logprobs: bool = False) -> Row:
    return Row("s", start, [1] * n, [0] * 99, sample, prompt_logprobs)


rows = st.lists(st.builds(row, st.integers(0, 40), st.integers(1, 20), sample=st.booleans()), max_size=4)


@settings(max_examples=60, deadline=None)
@given(rows=rows, window=st.sampled_from([0, 1, 3, 8, 64]))
def test_keys_and_operations_equal_a_count_one_by_one(rows, window):
    work = ModelWork(1000, 500, 90, 45, 2.0, (LayerWork(3, 16, window), LayerWork(1, 8, 0)))
    seen_by = {16: [], 8: []}
    for r in rows:
        tokens = range(r.start, r.start + r.n_tokens)
        for values, w in ((16, window), (8, 0)):
            seen_by[values].append([set(range(max(0, t - w + 1) if w else 0, t + 1)) for t in tokens])
    kv = sum(n * len(set().union(*sets)) for values, n in ((16, 3), (8, 1)) for sets in seen_by[values])
    attended = sum(
        n * values * len(keys) for values, n in ((16, 3), (8, 1)) for sets in seen_by[values] for keys in sets
    )
    n_tokens, n_logits = sum(r.n_tokens for r in rows), sum(r.sample for r in rows)
    found = work.step(rows)
    assert found.read_bytes == 1000 + 2.0 * kv + (90 if n_logits else 0)
    assert found.flops == 2 * (500 * n_tokens + 45 * n_logits) + 4 * attended


def test_reported_prompt_tokens_need_the_head_each():
    work = ModelWork(0, 0, 10, 7, 0.0, ())
    assert work.step([row(0, 5, sample=False, prompt_logprobs=True)]).flops == 2 * 7 * 5
    assert work.step([row(0, 5, sample=False)]).read_bytes == 0


def test_sizes_are_those_of_the_models_matrices():
    model = tiny_model("qwen2")
    layer = model.layers[0]
    a = layer.attention.heads
    layout = page_layout(len(model.layers), 8, a.n_kv, a.dim, model.embedding.dtype, "tiny")
    work = model_work(model, layout)
    hidden, inner, vocab = model.config.hidden, model.config.inner, model.config.vocab_size
    matrices = hidden * (a.n_q + 2 * a.n_kv) * a.dim + a.n_q * a.dim * hidden + 3 * hidden * inner
    assert work.body_values == len(model.layers) * matrices and work.body_bytes == 4 * work.body_values
    assert work.head_values == vocab * hidden
    assert work.kv_bytes == 2 * a.n_kv * a.dim * 4
    assert work.layers == (LayerWork(len(model.layers), a.n_q * a.dim, 0),)
