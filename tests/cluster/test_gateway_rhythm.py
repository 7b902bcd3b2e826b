"""When a worker's step ends is told from the news of its last ones, and only while it has news."""

import pytest

from kilat.cluster.gateway.rhythm import SILENT, Rhythm

pytestmark = pytest.mark.logic


def _heard(*at: tuple[int, float]) -> Rhythm:
    rhythm = Rhythm()
    for step, now_s in at:
        rhythm.stepped(step, now_s)
    return rhythm


def test_nothing_is_told_before_two_steps() -> None:
    assert _heard().next_end_s(0.0) is None
    assert _heard((7, 1.0)).next_end_s(1.0) is None


def test_step_ends_as_long_after_the_last_one_as_most_do() -> None:
    rhythm = _heard((1, 1.0), (2, 1.1), (3, 1.2), (4, 1.9), (5, 2.0))
    assert rhythm.step_s == pytest.approx(0.1)
    assert rhythm.next_end_s(2.04) == pytest.approx(2.1)


def test_late_step_ends_now() -> None:
    assert _heard((1, 1.0), (2, 1.1)).next_end_s(1.25) == 1.25


def test_nothing_is_told_of_a_worker_that_has_been_silent() -> None:
    assert _heard((1, 1.0), (2, 1.1)).next_end_s(1.1 + (SILENT + 0.1) * 0.1) is None


def test_steps_without_news_count_and_more_news_of_one_step_do_not() -> None:
    rhythm = _heard((1, 1.0), (4, 1.3), (4, 1.35), (3, 1.36))
    assert rhythm.step_s == pytest.approx(0.1)
    assert rhythm.next_end_s(1.36) == pytest.approx(1.4)
