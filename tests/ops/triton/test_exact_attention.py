"""Batch-invariant attention: a token has the same bits alone, in a batch, in chunks of any size, and where its row lies in the pool."""

import dataclasses

import pytest
import torch

from kilat.ops.triton.attention import Attention
from tests.ops.triton.steps import Shape, pool, step


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("shape", [Shape(n_q=4, n_kv=2, dim=32), Shape(n_q=6, n_kv=2, dim=64)], ids=str)
def test_tokens_have_the_same_bits_in_chunks_of_any_size(device, half, shape, window):
    run = Attention(device, exact=True)
    length = 700
    whole = step([length], [length], shape, device)
    kv = pool(whole, shape, half)
    q = torch.randn(length, shape.n_q, shape.dim).to(device, half)
    expected = run(q, kv, whole, scale=0.1, window=window)
    for n, end in ((1, 700), (1, 257), (1, 1), (3, 258), (8, 515), (100, 600)):
        chunk = dataclasses.replace(step([n], [end], shape, device), page_table=whole.page_table)
        got = run(q[end - n : end], kv, chunk, scale=0.1, window=window)
        assert torch.equal(got, expected[end - n : end]), (n, end)


def test_rows_have_the_same_bits_alone_and_in_a_batch(device, half):
    shape = Shape(n_q=8, n_kv=2, dim=32)
    run = Attention(device, exact=True)
    counts, lengths = [1, 1, 30, 2, 1], [300, 17, 290, 64, 513]
    together = step(counts, lengths, shape, device)
    kv = pool(together, shape, half)
    q = torch.randn(sum(counts), shape.n_q, shape.dim).to(device, half)
    expected = run(q, kv, together, scale=0.1)
    for b, (n, length) in enumerate(zip(counts, lengths)):
        first = sum(counts[:b])
        alone = dataclasses.replace(
            step([n], [length], shape, device), page_table=together.page_table[b : b + 1]
        )
        assert torch.equal(run(q[first : first + n], kv, alone, scale=0.1), expected[first : first + n])
