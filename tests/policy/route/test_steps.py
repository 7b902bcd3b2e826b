"""What parts of steps cost, out of sums over many of them."""

import random
from typing import NamedTuple

import pytest

from kilat.policy.route.steps import StepTimes

pytestmark = pytest.mark.logic


class Truth(NamedTuple):
    base_s: float
    token_s: float
    row_s: float

    def seconds(self, n_steps: float, n_prompt: float, n_rows: float) -> float:
        return self.base_s * n_steps + self.token_s * n_prompt + self.row_s * n_rows


TRUTH = Truth(0.01, 0.0001, 0.0002)


def interval(rng: random.Random, kind: str) -> tuple[int, int, int]:
    """Steps, prompt tokens and rows of half a second or so."""
    n_steps, n_rows = rng.randint(10, 40), rng.randint(1, 60)
    if kind == "prefill":
        return n_steps, sum(rng.randint(50, 2048) for _ in range(n_steps)), 0
    return n_steps, (0 if kind == "decode" else n_steps * rng.randint(0, 110)), n_steps * n_rows


def fed(*kinds: str, n: int = 60, truth: Truth = TRUTH, noise: float = 0.0) -> StepTimes:
    rng, times = random.Random(1), StepTimes()
    for i in range(n):
        counts = interval(rng, kinds[i % len(kinds)])
        times.measured(*counts, truth.seconds(*counts) * rng.uniform(1 - noise, 1 + noise))
    return times


def test_steps_that_decode_alone_are_told_apart_by_how_many_sessions_they_have():
    times = fed("decode")
    assert times.decode_s(0) == pytest.approx(0.01, rel=0.02)
    assert times.row_s == pytest.approx(0.0002, rel=0.05)
    assert times.prompt_tokens_per_s == 0.0, "nobody has computed a prompt yet"


def test_chunks_of_prompts_beside_decode_are_told_from_it():
    times = fed("mixed", noise=0.03)
    assert times.prompt_tokens_per_s == pytest.approx(10_000, rel=0.15)
    assert times.decode_s(40) == pytest.approx(0.018, rel=0.1)


def test_workers_that_do_one_kind_of_work_each_know_all_parts_together():
    times = fed("prefill", "decode", noise=0.03)
    assert times.prompt_tokens_per_s == pytest.approx(10_000, rel=0.1)
    assert times.decode_s(40) == pytest.approx(0.018, rel=0.1)


def test_time_of_the_first_interval_is_that_of_prompt_tokens_or_else_of_steps():
    times = StepTimes()
    times.measured(2, 4000, 1, 0.4)
    assert times.prompt_tokens_per_s == pytest.approx(10_000, rel=0.05)
    times = StepTimes()
    times.measured(10, 0, 30, 0.2)
    assert times.decode_s(3) == pytest.approx(0.02, rel=0.05)
    assert times.seconds(10, 0, 30) == pytest.approx(0.2, rel=0.05)


def test_nothing_is_known_before_the_first_interval():
    times = StepTimes()
    assert (times.prompt_tokens_per_s, times.row_s, times.decode_s(9), times.seconds(1, 1, 1)) == (0, 0, 0, 0)


def test_worker_that_becomes_slower_is_followed():
    rng, times = random.Random(2), StepTimes()
    for i in range(300):
        counts = interval(rng, "mixed")
        times.measured(*counts, TRUTH.seconds(*counts) * (1 if i < 100 else 3))
    assert times.decode_s(40) == pytest.approx(0.054, rel=0.1)
    assert times.prompt_tokens_per_s == pytest.approx(3333, rel=0.15)


def test_equal_intervals_cannot_tell_parts_apart_but_predict_themselves_and_take_nothing_back():
    times = fed("mixed")
    for _ in range(30):
        times.measured(20, 0, 20 * 7, TRUTH.seconds(20, 0, 20 * 7))
    assert times.decode_s(7) == pytest.approx(0.0114, rel=0.02)
    assert times.prompt_tokens_per_s == pytest.approx(10_000, rel=0.1)
