"""The arithmetic of load tests."""

import math
import random
from itertools import pairwise
from statistics import fmean, pstdev, quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.cli.measures import Sample, percentile, poisson_arrivals, spread, summarize

pytestmark = pytest.mark.logic


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50))
def test_percentiles_are_those_of_the_statistics_module(values: list[float]) -> None:
    inclusive = quantiles(values, n=100, method="inclusive")
    for p in (1, 50, 90, 99):
        assert percentile(values, p) == pytest.approx(inclusive[p - 1], rel=1e-9, abs=1e-6)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_lies_between_the_extremes_and_does_not_need_order(values: list[float], p: float) -> None:
    got = percentile(values, p)
    assert min(values) <= got + 1e-9 and got - 1e-9 <= max(values)
    assert got == percentile(values[::-1], p)
    assert percentile(values, 0) == min(values) and percentile(values, 100) == max(values)


def test_poisson_arrivals_are_a_function_of_the_seed() -> None:
    assert poisson_arrivals(5, 100, 3) == poisson_arrivals(5, 100, 3)
    assert poisson_arrivals(5, 100, 3) != poisson_arrivals(5, 100, 4)
    assert poisson_arrivals(5, 50, 3) == poisson_arrivals(5, 100, 3)[:50]


@pytest.mark.parametrize("rate", [0.5, 4.0, 200.0])
def test_poisson_gaps_have_the_mean_and_the_spread_of_their_rate(rate: float) -> None:
    times = poisson_arrivals(rate, 20_001, 1)
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0.0 and all(g >= 0 for g in gaps)
    assert fmean(gaps) == pytest.approx(1 / rate, rel=0.03)
    # exponential: standard deviation = mean, and 1 - 1/e of the gaps are shorter than the mean
    assert pstdev(gaps) == pytest.approx(1 / rate, rel=0.05)
    assert sum(g < 1 / rate for g in gaps) / len(gaps) == pytest.approx(1 - 1 / math.e, abs=0.01)


def test_no_arrivals_for_no_requests() -> None:
    assert poisson_arrivals(1, 0, 0) == []
    assert poisson_arrivals(1, 1, 0) == [0.0]


def sample(
    arrival: float = 10.0, sent: float = 10.0, events: tuple[float, ...] = (11.0, 12.0, 14.0), **more: object
) -> Sample:
    fields = {"input_tokens": 5, "output_tokens": 3, **more}
    return Sample(arrival, sent, events[-1] + 1 if events else sent + 1, events, **fields)  # type: ignore[arg-type]


def test_times_of_one_request() -> None:
    s = sample()
    assert (s.ttft_s, s.tpot_s, s.e2e_s) == (1.0, 1.5, 5.0)


def test_a_late_client_counts_as_waiting_time() -> None:
    assert sample(arrival=8.0).ttft_s == 3.0
    assert summarize([sample(arrival=8.0)], {}).late_ms == 2000.0


def test_tokens_that_come_in_one_event_are_counted_as_tokens() -> None:
    assert sample(events=(11.0, 12.0), output_tokens=6).tpot_s == pytest.approx(0.2)
    assert sample(events=(11.0,), output_tokens=1).tpot_s is None


def test_summary_of_a_round() -> None:
    s = summarize([sample(), sample(arrival=11.0, sent=11.0, events=(12.0, 13.0, 14.0))], {})
    assert (s.requests, s.errors, s.elapsed_s) == (2, 0, 5.0)
    assert s.request_rps == pytest.approx(2 / 5)
    assert s.output_tps == pytest.approx(6 / 5) and s.total_tps == pytest.approx(16 / 5)
    assert s.ttft_ms["p50"] == 1000.0 and s.tpot_ms["mean"] == 1250.0
    assert s.itl_ms["mean"] == pytest.approx(fmean([1000, 2000, 1000, 1000])) and s.itl_ms["p99"] > 1900


def test_errors_count_but_give_no_times_and_no_tokens() -> None:
    failed = Sample(10.0, 10.0, 30.0, (), error="overloaded: full")
    s = summarize([sample(), failed], {"ttft": 1e9})
    assert (s.errors, s.elapsed_s, s.output_tps) == (1, 20.0, pytest.approx(3 / 20))
    assert s.goodput_rps == pytest.approx(1 / 20) and s.e2e_ms["p99"] == 5000.0


def test_a_round_of_errors_only_has_no_distributions() -> None:
    s = summarize([Sample(0.0, 0.0, 1.0, error="x")], {})
    assert (s.errors, s.ttft_ms, s.output_tps) == (1, {}, 0.0)
    assert summarize([], {}).requests == 0


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ({}, True),
        ({"ttft": 1000.0}, True),
        ({"ttft": 999.9}, False),
        ({"tpot": 1500.0, "ttft": 1000.0}, True),
        ({"tpot": 1499.0, "ttft": 1000.0}, False),
        ({"e2e": 4999.0}, False),
    ],
)
def test_goodput_counts_requests_within_every_limit(slo: dict[str, float], good: bool) -> None:
    assert sample().meets(slo) is good
    assert (summarize([sample()], slo).goodput_rps > 0) is good


def test_a_stream_that_failed_after_its_first_token_is_no_good_request() -> None:
    assert not sample(error="peer_failed: gone").meets({"ttft": 1e9})


def test_spread_of_rounds() -> None:
    values = [3.0, 1.0, 2.0]
    random.Random(0).shuffle(values)
    assert spread(values) == {"median": 2.0, "min": 1.0, "max": 3.0, "n": 3}
