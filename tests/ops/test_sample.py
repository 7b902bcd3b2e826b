"""The draw: known Philox vectors, the filters against a slow oracle, the distribution, and independence from everything else."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.ops.sample import Draws, Filter, draw, greedy, philox, sample_row, top_logprobs, uniform, uniforms

pytestmark = pytest.mark.cpu


def filter_of(**changes) -> Filter:
    base = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7, "position": 3}
    return Filter(**{**base, **changes})


def test_philox_gives_the_published_vectors():
    # Random123's known answers for philox4x32-10
    ones = 0xFFFFFFFF
    assert philox((0, 0), (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((ones, ones), (ones, ones, ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox((0xA4093822, 0x299F31D0), pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31 - 1))
def test_uniform_is_inside_the_open_interval_and_exact_in_fp32(seed, position):
    u = uniform(seed, position)
    assert 0.0 < u < 1.0
    assert float(torch.tensor(u, dtype=torch.float32)) == u


def test_uniform_differs_by_seed_position_and_purpose():
    values = {uniform(s, p, q) for s in (0, 1, -1, 2**40) for p in range(50) for q in (0, 1)}
    assert len(values) == 4 * 50 * 2


def test_greedy_takes_the_lowest_id_of_a_tie_and_shows_nan():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [0.0, float("nan"), 1.0, 0.0]])
    ids, top = greedy(logits)
    assert ids[0] == 1
    assert torch.isnan(top[1])


def kept_by_oracle(logits: list[float], f: Filter) -> set[int]:
    """The filters, one sentence each, in fp64 and plain Python."""
    x = [v / f.temperature for v in logits]
    kept = set(range(len(x)))
    if f.min_p > 0:
        kept = {i for i in kept if x[i] >= max(x) + math.log(f.min_p)}
    if f.top_k:
        floor = sorted(x, reverse=True)[min(f.top_k, len(x)) - 1]
        kept = {i for i in kept if x[i] >= floor}
    if f.top_p < 1.0:
        w = {i: math.exp(x[i] - max(x)) for i in kept}
        total, run = sum(w.values()), 0.0
        for i in sorted(kept, key=lambda i: -x[i]):
            run += w[i]
            floor = x[i]
            if run >= f.top_p * total:
                break
        kept = {i for i in kept if x[i] >= floor}
    return kept


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=2, max_size=60),
    st.sampled_from([0.25, 0.7, 1.0, 3.0]),
    st.integers(0, 8),
    st.sampled_from([0.05, 0.31, 0.77, 0.96, 1.0]),
    st.sampled_from([0.0, 0.03, 0.4]),
)
def test_only_tokens_that_the_filters_keep_are_drawn_and_all_of_them_can_be(
    values, temperature, top_k, top_p, min_p
):
    # quarter steps make ties; odd filter values keep sums away from the thresholds
    logits = torch.tensor([v / 4 for v in values])
    f = filter_of(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = kept_by_oracle(logits.tolist(), f)
    drawn = {sample_row(logits, filter_of(**{**_fields(f), "position": p})) for p in range(40)}
    assert drawn <= kept
    likely = {i for i in kept if logits[i] == logits.max()}
    assert drawn & likely or temperature > 1.0


def _fields(f: Filter) -> dict:
    return {name: getattr(f, name) for name in Filter.__slots__}


def test_frequencies_follow_the_softmax():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    n = 20_000
    counts = torch.zeros(5)
    for position in range(n):
        counts[sample_row(logits, filter_of(position=position))] += 1
    expected = torch.softmax(logits, 0) * n
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert chi2 < 23.5  # 4 degrees of freedom, 1 in 10,000; the draws are fixed, so this cannot flake


def test_a_nucleus_wider_than_the_short_list_is_found_by_the_full_sort():
    logits = torch.zeros(5000) - torch.arange(5000) * 1e-4
    f = filter_of(top_p=0.9)
    drawn = [sample_row(logits, filter_of(top_p=0.9, position=p)) for p in range(200)]
    assert max(drawn) > 2000
    assert max(drawn) <= max(kept_by_oracle(logits.tolist(), f))


def test_a_row_draws_the_same_alone_and_as_a_slice_of_a_batch():
    logits = torch.randn(33, 4999, generator=torch.Generator().manual_seed(0))
    for i in range(33):
        f = filter_of(position=i, top_p=0.9, temperature=0.8)
        assert sample_row(logits[i], f) == sample_row(logits[i].clone(), f)


def test_top_logprobs_are_log_softmax_best_first_and_ties_by_id():
    logits = torch.tensor([1.0, 3.0, 3.0, -2.0, 0.0])
    expected = torch.log_softmax(logits, 0)
    own, top = top_logprobs(logits, 3, 3)
    assert own == pytest.approx(float(expected[3]), abs=1e-6)
    assert [i for i, _ in top] == [1, 2, 0]
    assert [v for _, v in top] == pytest.approx([float(expected[i]) for i in (1, 2, 0)], abs=1e-6)
    assert top_logprobs(logits, 0, 0)[1] == []


def test_uniforms_of_a_batch_equal_the_single_ones():
    seeds = np.array([0, 1, -1, 2**40 + 5, -(2**63), 2**63 - 1], np.int64)
    positions = np.array([0, 1, 2, 77, 2**31 - 1, 5], np.int64)
    assert uniforms(seeds, positions).tolist() == [uniform(int(s), int(p)) for s, p in zip(seeds, positions)]


def draws_of(filters: list[Filter]) -> Draws:
    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(f, name) for f in filters], dtype=dtype)

    u = torch.tensor([uniform(f.seed, f.position) for f in filters])
    floats = [column(n, torch.float32) for n in ("temperature", "top_p", "min_p")]
    return Draws(floats[0], column("top_k", torch.int32), floats[1], floats[2], u)


@pytest.mark.parametrize("filtered", [False, True])
def test_the_batch_form_draws_what_the_row_form_draws(filtered):
    logits = torch.randn(64, 999, generator=torch.Generator().manual_seed(3)) * 3
    choices = (
        [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (40, 0.9, 0.02)]
        if filtered
        else [(0, 1.0, 0.0)]
    )
    filters = []
    for i in range(64):
        top_k, top_p, min_p = choices[i % len(choices)]
        filters.append(filter_of(position=i, top_k=top_k, top_p=top_p, min_p=min_p, temperature=0.5 + i % 3))
    ids = draw(logits, draws_of(filters), filtered=filtered)
    assert ids.tolist() == [sample_row(logits[i], f) for i, f in enumerate(filters)]


def test_the_batch_form_is_greedy_at_temperature_zero_and_marks_rows_that_are_not_finite():
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, float("nan"), 1.0], [5.0, 0.0, 0.0]])
    assert draw(logits, None, filtered=False).tolist() == [1, -2, 0]
    cold = [filter_of(temperature=t) for t in (0.0, 0.0, 1e-3)]
    assert draw(logits, draws_of(cold), filtered=True).tolist() == [1, -2, 0]
