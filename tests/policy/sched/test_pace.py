"""Moving averages of measured steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.policy.sched.pace import FIRST_TOKENS, MARGIN, MAX_RETRY_S, MIN_RETRY_S, Pace

pytestmark = pytest.mark.logic


class Machine:
    """Steps that take ``decode_s`` and ``token_s`` for every prefill token, which grows by ``growth`` with each."""

    def __init__(self, decode_s: float, token_s: float, growth: float = 0.0) -> None:
        self.decode_s, self.token_s, self.growth = decode_s, token_s, growth
        self.now_s = 0.0
        self.n_prefill = 0

    def step(self, pace: Pace, n_decode: int, n_prefill: int) -> float:
        took = (self.decode_s if n_decode else 0.0) + self.token_s * n_prefill
        pace.stepped(self.now_s, self.now_s + took, n_decode, n_prefill)
        self.now_s += took
        self.token_s *= 1 + self.growth * n_prefill
        self.n_prefill += n_prefill
        return took


def test_without_target_the_whole_budget_is_for_prefill():
    pace = Pace(None)
    pace.stepped(0.0, 1.0, 0, 10)
    assert pace.prefill_tokens(3, 500, 16) == 500


def test_before_the_first_measurement_a_stream_waits_for_a_few_tokens_only():
    assert Pace(0.01).prefill_tokens(3, 5000, 16) == FIRST_TOKENS
    assert Pace(0.01).prefill_tokens(3, 50, 16) == 50


def test_what_decode_rows_take_is_part_of_the_target():
    pace, machine = Pace(0.1), Machine(0.04, 0.0001)
    machine.step(pace, 0, 1000)
    assert pace.prefill_tokens(5, 5000, 16) == pytest.approx(MARGIN * 0.1 / 0.0001, abs=1)
    for _ in range(30):
        machine.step(pace, 5, 0)
    assert pace.prefill_tokens(5, 5000, 16) == pytest.approx((MARGIN * 0.1 - 0.04) / 0.0001, abs=1.5)


def test_prompts_get_a_page_when_decode_rows_alone_take_the_target():
    pace, machine = Pace(0.1), Machine(0.5, 0.0001)
    machine.step(pace, 0, 1000)
    machine.step(pace, 5, 0)
    assert pace.prefill_tokens(5, 5000, 16) == 16


def test_tokens_of_a_step_that_the_target_bounds_are_a_multiple_of_what_the_device_is_prepared_for():
    pace = Pace(0.1, token_multiple=64)
    pace.stepped(0.0, 1.0, 0, 5000)
    assert pace.prefill_tokens(40, 10_000, 16) + 40 == 448  # 480 would fit
    assert pace.prefill_tokens(40, 100, 16) == 100


def test_a_share_that_rounding_would_take_most_of_is_not_rounded():
    pace = Pace(0.1, token_multiple=128)
    pace.stepped(0.0, 1.0, 0, 1080)  # 95 tokens in what a step aims at
    assert pace.prefill_tokens(40, 10_000, 16) == 88
    assert pace.prefill_tokens(20, 10_000, 16) == 95
    assert pace.prefill_tokens(100, 10_000, 16) == 95


def test_without_decode_rows_the_target_protects_nobody():
    pace = Pace(0.1)
    pace.stepped(0.0, 1.0, 0, 1000)
    assert pace.prefill_tokens(0, 500, 16) == 500


def test_step_that_was_planned_during_another_is_measured_from_the_end_of_that_one():
    pace = Pace(0.1)
    pace.stepped(0.0, 1.0, 0, 1000)
    pace.stepped(0.5, 2.0, 0, 1000)
    assert pace.s_per_token == pytest.approx(0.001)


def test_average_follows_a_change():
    pace = Pace(0.1)
    for i in range(40):
        pace.stepped(i, i + (0.1 if i < 20 else 0.5), 0, 100)
    assert pace.s_per_token == pytest.approx(0.005, rel=0.05)


def test_clock_that_stands_still_measures_nothing():
    pace = Pace(0.1)
    pace.stepped(1.0, 1.0, 0, 100)
    assert pace.s_per_token is None


def test_steps_of_a_long_prompt_keep_the_target_and_use_it_while_its_tokens_grow_dearer():
    pace, machine = Pace(0.02, token_multiple=64), Machine(0.006, 20e-6, growth=4e-5)
    for _ in range(20):
        machine.step(pace, 64, 0)
    machine.step(pace, 0, 1000)
    times = [machine.step(pace, 64, pace.prefill_tokens(64, 8000, 16)) for _ in range(14)]
    assert max(times) < 0.02
    assert min(times[2:]) > 0.8 * 0.02


def test_a_slow_first_step_is_forgotten_within_a_few_steps():
    pace, machine = Pace(0.02, token_multiple=32), Machine(0.006, 20e-6)
    pace.stepped(0.0, 3.0, 0, 8192)  # kernels were compiled
    machine.now_s = 3.0
    machine.step(pace, 64, 0)
    shares = [pace.prefill_tokens(64, 8000, 16)]
    while shares[-1] < 500 and len(shares) < 7:  # doubled each time from one page on
        machine.step(pace, 64, shares[-1])
        shares.append(pace.prefill_tokens(64, 8000, 16))
    assert shares[-1] >= 500


@given(st.floats(1e-4, 0.5), st.floats(1e-7, 1e-2), st.integers(0, 200))
def test_no_step_takes_twice_the_target_where_a_page_fits(decode_share: float, token_s: float, n_tail: int):
    """From a first step of ``n_tail`` tokens on, whatever machine it is."""
    target_s = 0.1
    pace, machine = Pace(target_s), Machine(decode_share * target_s, token_s)
    machine.step(pace, 4, 0)
    if n_tail:
        machine.step(pace, 4, n_tail)
    machine.step(pace, 4, pace.prefill_tokens(4, FIRST_TOKENS, 16))
    for _ in range(10):
        n = pace.prefill_tokens(4, 100_000, 16)
        assert machine.step(pace, 4, n) < 2 * target_s or n == 16


def test_a_short_step_does_not_spoil_what_long_ones_have_measured():
    pace, machine = Pace(0.1), Machine(0.01, 0.0001)
    for _ in range(5):
        machine.step(pace, 4, 0)
        machine.step(pace, 4, 800)
    before = pace.prefill_tokens(4, 5000, 16)
    pace.stepped(machine.now_s, machine.now_s + 0.02, 4, 5)  # ten milliseconds late: 0.002 s a token
    assert pace.prefill_tokens(4, 5000, 16) > 0.8 * before


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
