"""The draw in one kernel: equal to the batch reference for every filter, for ties and for broken rows; independent of the batch."""

import math

import pytest
import torch

from kilat.ops import sample as reference
from kilat.ops.sample import Draws
from kilat.ops.triton.sample import draw

# temperature, top_k, top_p, min_p
KINDS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.6, 0.0),
    (0.9, 0, 1.0, 0.1),
    (2.0, 40, 0.9, 0.02),
]


def draws_of(kinds, seed, device):
    u = torch.rand(len(kinds), generator=torch.Generator().manual_seed(seed))
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*kinds))
    return Draws(
        temperature.float().to(device),
        top_k.int().to(device),
        top_p.float().to(device),
        min_p.float().to(device),
        u.to(device),
    )


def logits_of(n, vocab, dtype):
    return (torch.randn(n, vocab, generator=torch.Generator().manual_seed(vocab)) * 2).to(dtype)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("vocab", [11, 300, 20_000])
def test_draws_equal_the_reference(device, half, vocab, wide):
    n = 48 if device.type == "cuda" else 12 if vocab < 1000 else 6
    logits = logits_of(n, vocab, torch.float32 if wide else half).to(device)
    kinds = [KINDS[i % len(KINDS)] for i in range(n)]
    draws = draws_of(kinds, 3, device)
    ids = draw(logits, draws, filtered=True)
    expected = reference.draw(logits, draws, filtered=True)
    assert ids.dtype == torch.int32
    # sums of different order: a draw may land on the neighbour once in a great while
    assert (ids != expected).sum() <= 1
    assert torch.equal(ids[:: len(KINDS)], expected[:: len(KINDS)])


def test_unfiltered_and_greedy_batches_equal_the_reference(device, half):
    logits = logits_of(32, 1000, half).to(device)
    draws = draws_of([(0.8, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0)] * 16, 5, device)
    assert (draw(logits, draws, filtered=False) != reference.draw(logits, draws, filtered=False)).sum() <= 1
    assert torch.equal(draw(logits, None, filtered=False), reference.draw(logits, None, filtered=False))


def test_ties_at_a_threshold_are_all_kept_and_greedy_takes_the_lowest(device, half):
    row = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, -1.0, 3.0, 0.0], dtype=half)
    n = 64
    for kind, kept in (
        ((1.0, 3, 1.0, 0.0), {1, 2, 3, 4, 6}),
        ((1.0, 0, 0.5, 0.0), {1, 6}),
        ((0.0, 0, 1.0, 0.0), {1}),
    ):
        ids = draw(row.repeat(n, 1).to(device), draws_of([kind] * n, 9, device), filtered=True)
        assert set(ids.tolist()) == kept


def test_frequencies_follow_the_softmax(device):
    row = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    n = 4000 if device.type == "cuda" else 400
    ids = draw(row.repeat(n, 1).to(device), draws_of([(1.0, 0, 1.0, 0.0)] * n, 5, device), filtered=False)
    counts = torch.bincount(ids.cpu().long(), minlength=5)
    expected = torch.softmax(row, 0) * n
    assert (
        float(((counts - expected) ** 2 / expected).sum()) < 23.5
    )  # 4 degrees of freedom, 1 in 10,000; fixed draws


def test_a_row_draws_the_same_alone_and_in_a_batch(device, half):
    logits = logits_of(24, 700, half).to(device)
    draws = draws_of([KINDS[i % len(KINDS)] for i in range(24)], 7, device)
    together = draw(logits, draws, filtered=True)
    for i in range(24):
        one = Draws(*(getattr(draws, name)[i : i + 1] for name in Draws.__slots__))
        assert int(draw(logits[i : i + 1], one, filtered=True)) == int(together[i])


def test_a_row_that_is_not_finite_gives_minus_two_and_leaves_the_others_alone(device, half):
    logits = torch.randn(4, 100).to(device, half)
    logits[1, 50] = math.nan
    logits[2, 7] = math.inf
    for draws in (None, draws_of([(0.8, 0, 0.9, 0.0)] * 4, 1, device)):
        ids = draw(logits, draws, filtered=draws is not None)
        assert ids[1] == ids[2] == -2
        assert ids[0] >= 0 and ids[3] >= 0
