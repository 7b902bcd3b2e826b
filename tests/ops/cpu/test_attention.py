"""attention on the CPU: right, and the same bits for a query however its prompt was cut and whatever else is in the step."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.base.errors import EngineError
from kilat.ops.kernels import reference
from tests.ops.cpu.cases import SHAPES, Shape, differences, different_bits, normal, part, pool, step

pytestmark = pytest.mark.cpu

REFERENCE = reference()
DTYPES = (torch.float32, torch.bfloat16)
# decode rows at the edges of tiles and splits, a prompt, a chunk of one, a verification row
COUNTS, LENGTHS = [1, 1, 5, 70, 1, 130, 3, 1], [1, 300, 5, 320, 64, 130, 515, 257]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [0, 1, 90], ids=lambda w: f"window{w}")
def test_attention_agrees_with_reference_on_mixed_rows(kernels, dtype, shape, window):
    batch = step(COUNTS, LENGTHS, shape)
    kv = pool(batch, shape, dtype, seed=1)
    q = normal(2, sum(COUNTS), shape.n_q, shape.dim, dtype=dtype)
    scale = shape.dim**-0.5
    got = kernels.attention(q, kv, batch, scale=scale, window=window)
    # what no row owns is NaN in the pool: it must not reach the result, and the reference must not see it either
    expected = REFERENCE.attention(q.float(), kv.nan_to_num().float(), batch, scale=scale, window=window)
    assert not differences(got, expected, 2)


@pytest.mark.parametrize("scale", [1e-3, 3.0])
def test_flat_and_peaked_weights_agree_with_reference(kernels, dtype, scale):
    shape = Shape()
    batch = step([3, 1], [200, 300], shape)
    kv, q = pool(batch, shape, dtype, seed=3), normal(4, 4, shape.n_q, shape.dim, dtype=dtype)
    expected = REFERENCE.attention(q.float(), kv.nan_to_num().float(), batch, scale=scale)
    assert not differences(kernels.attention(q, kv, batch, scale=scale), expected, 4)


@settings(max_examples=15)
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_cutting_a_prompt_anywhere_keeps_every_bit(kernels, lone, data, seed):
    shape = data.draw(st.sampled_from(SHAPES))
    window = data.draw(st.sampled_from([0, 0, 40, 200]))
    length = data.draw(st.integers(1, 400))
    count = data.draw(st.integers(1, length))
    batch = step([count], [length], shape, seed)
    for dtype in DTYPES:
        kv = pool(batch, shape, dtype, seed)
        q = normal(seed, count, shape.n_q, shape.dim, dtype=dtype)
        whole = kernels.attention(q, kv, batch, scale=0.2, window=window)
        first = 0
        while first < count:
            n = data.draw(st.integers(1, count - first))
            got = lone.attention(q[first : first + n], kv, part(batch, 0, first, n), scale=0.2, window=window)
            assert not different_bits(got, whole[first : first + n], seed)
            first += n


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_query_alone_has_bits_of_query_in_mixed_step(kernels, dtype, shape):
    batch = step(COUNTS, LENGTHS, shape)
    kv = pool(batch, shape, dtype, seed=6)
    q = normal(7, sum(COUNTS), shape.n_q, shape.dim, dtype=dtype)
    whole = kernels.attention(q, kv, batch, scale=0.125)
    for row, count in enumerate(COUNTS):
        for i in {0, count // 2, count - 1}:
            t = batch.row_start[row].item() + i
            got = kernels.attention(q[t : t + 1], kv, part(batch, row, i, 1), scale=0.125)
            assert not different_bits(got[0], whole[t], 7)


@pytest.mark.parametrize("threads", [3, 8])
def test_number_of_threads_changes_no_bit(kernels_of, lone, dtype, threads):
    shape = Shape(9, 3, 64, 16)
    many = kernels_of(threads)
    for counts, lengths in (
        ([1], [2100]),
        ([1] * 20, list(range(1, 1000, 50))),
        ([200], [900]),
        (COUNTS, LENGTHS),
    ):
        batch = step(counts, lengths, shape)
        kv, q = pool(batch, shape, dtype, seed=8), normal(9, sum(counts), 9, 64, dtype=dtype)
        got, expected = (k.attention(q, kv, batch, scale=0.125) for k in (many, lone))
        assert not different_bits(got, expected, 9)


def test_later_tokens_that_overflowed_do_not_reach_earlier_queries(kernels, dtype):
    shape = Shape()
    batch = step([100], [100], shape)
    kv, q = pool(batch, shape, dtype, seed=10), normal(11, 100, shape.n_q, shape.dim, dtype=dtype)
    clean = kernels.attention(q, kv, batch, scale=0.125)
    slot = batch.slots[80].item()
    kv[slot // shape.page_tokens, 0, slot % shape.page_tokens] = torch.inf
    got = kernels.attention(q, kv, batch, scale=0.125)
    assert not different_bits(got[:80], clean[:80], 11)


def test_no_rows_give_no_rows(kernels, dtype):
    shape = Shape()
    batch = step([1], [1], shape)
    empty = part(batch, 0, 0, 1)
    empty.row_start[1] = 0
    kv = pool(batch, shape, dtype, seed=0)
    got = kernels.attention(torch.empty(0, shape.n_q, shape.dim, dtype=dtype), kv, empty, scale=1.0)
    assert got.shape == (0, shape.n_q * shape.dim)


def test_heads_that_do_not_group_are_refused(kernels):
    shape = Shape()
    batch = step([1], [1], shape)
    kv = pool(batch, shape, torch.float32, seed=0)
    with pytest.raises(EngineError, match="7 heads"):
        kernels.attention(torch.zeros(1, 7, 64), kv, batch, scale=1.0)
