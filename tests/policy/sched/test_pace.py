"""Moving averages of measured steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.policy.sched.pace import MAX_RETRY_S, MIN_RETRY_S, Pace

pytestmark = pytest.mark.logic


def test_without_target_the_whole_budget_is_for_prefill():
    pace = Pace(None)
    pace.stepped(0.0, 1.0, 10, prefill=True)
    assert pace.prefill_tokens(3, 500, 16) == 500


def test_before_the_first_measurement_the_whole_budget_is_for_prefill():
    assert Pace(0.01).prefill_tokens(3, 500, 16) == 500


def test_decode_rows_are_part_of_the_target():
    pace = Pace(0.1)
    pace.stepped(0.0, 1.0, 1000, prefill=True)
    assert pace.prefill_tokens(1, 500, 16) == 99
    assert pace.prefill_tokens(30, 500, 16) == 70
    assert pace.prefill_tokens(95, 500, 16) == 16


def test_tokens_of_a_step_that_the_target_bounds_are_a_multiple_of_what_the_device_is_prepared_for():
    pace = Pace(0.1, token_multiple=64)
    pace.stepped(0.0, 1.0, 5000, prefill=True)
    assert pace.prefill_tokens(40, 10_000, 16) + 40 == 448  # 500 would fit
    assert pace.prefill_tokens(40, 100, 16) == 100
    assert pace.prefill_tokens(600, 10_000, 16) == 16


def test_steps_of_decode_rows_only_do_not_count():
    pace = Pace(0.1)
    pace.stepped(0.0, 1.0, 1000, prefill=True)
    pace.stepped(1.0, 2.0, 1, prefill=False)
    assert pace.prefill_tokens(1, 500, 16) == 99


def test_without_decode_rows_the_target_protects_nobody():
    pace = Pace(0.1)
    pace.stepped(0.0, 1.0, 1000, prefill=True)
    assert pace.prefill_tokens(0, 500, 16) == 500


def test_step_that_was_planned_during_another_is_measured_from_the_end_of_that_one():
    pace = Pace(0.1)
    pace.stepped(0.0, 1.0, 1000, prefill=True)
    pace.stepped(0.5, 2.0, 1000, prefill=True)
    assert pace.s_per_token == pytest.approx(0.001)


def test_average_follows_a_change():
    pace = Pace(0.1)
    for i in range(40):
        pace.stepped(i, i + (0.1 if i < 20 else 0.5), 100, prefill=True)
    assert pace.s_per_token == pytest.approx(0.005, rel=0.05)


def test_clock_that_stands_still_measures_nothing():
    pace = Pace(0.1)
    pace.stepped(1.0, 1.0, 100, prefill=True)
    assert pace.s_per_token is None


@given(st.lists(st.tuples(st.floats(0, 1e4), st.integers(1, 50)), max_size=20), st.integers(0, 10**6))
def test_time_to_come_back_is_always_in_bounds(finishes: list[tuple[float, int]], n_waiting: int):
    pace = Pace(None)
    for now_s, n in finishes:
        pace.finished(n, now_s)
    assert MIN_RETRY_S <= pace.retry_after_s(n_waiting) <= MAX_RETRY_S


def test_time_to_come_back_is_that_of_half_the_queue():
    pace = Pace(None)
    for i in range(10):
        pace.finished(2, i)  # two a second
    assert pace.retry_after_s(20) == pytest.approx(5.0)
