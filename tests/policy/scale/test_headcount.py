"""Workers are started for a wish that lasts, and ended one by one after a much longer one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.policy.scale.config import ScaleConfig
from kilat.policy.scale.headcount import Headcount
from kilat.policy.scale.roles import BOTH, RoleScaler
from kilat.policy.scale.window import RoleWorker, Window

pytestmark = pytest.mark.logic


def settings_of(**given: float) -> ScaleConfig:
    fields = {"least_workers": 2, "most_workers": 6, "grow_after_s": 3.0, "shrink_after_s": 10.0}
    return ScaleConfig(1.0, 0.1, **{**fields, **given})


class Team:
    """Workers that are started and ended as it is decided, one decision per second."""

    def __init__(self, n: int = 2, **given: float) -> None:
        self.headcount = Headcount(settings_of(**given))
        self.n = n
        self.now_s = 0.0

    def wish(self, *wishes: int) -> list[int]:
        """How many there are after each second in which so many were wished for."""
        found = []
        for wished in wishes:
            self.n += self.headcount.on_wish(wished, self.n, self.now_s)
            self.now_s += 1.0
            found.append(self.n)
        return found


def test_wish_that_lasts_starts_all_that_are_wished_for():
    assert Team().wish(4, 5, 4, 5, 5, 5) == [2, 2, 2, 5, 5, 5]


def test_short_wish_starts_nobody():
    assert Team().wish(*[5, 5, 5, 2] * 5) == [2] * 20


def test_wish_for_fewer_ends_one_worker_at_a_time_and_never_one_of_the_least():
    found = Team(5).wish(*[1] * 60)
    assert [found.index(n) for n in (4, 3, 2)] == [10, 20, 30]
    assert found[-1] == 2


def test_moment_of_need_keeps_workers_for_another_while():
    team = Team(4)
    assert team.wish(*[3] * 10, 4, *[3] * 10)[-1] == 4
    assert team.wish(3)[-1] == 3


def test_no_more_are_started_than_there_may_be():
    assert Team().wish(*[50] * 9)[-1] == 6
    assert Team(most_workers=0).wish(*[50] * 9)[-1] == 50, "without a bound"


def test_workers_below_the_least_are_started_though_nobody_wishes_for_them():
    assert Team(1).wish(*[1] * 4)[-1] == 2


def test_nothing_is_done_while_nobody_knows():
    assert Team(4).wish(*[0] * 30)[-1] == 4


WISHES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 15)), max_size=20)


@settings(max_examples=50, deadline=None)
@given(WISHES, st.integers(2, 6))
def test_number_stays_within_bounds_and_changes_only_towards_the_wish(wishes, n):
    team = Team(n)
    for wished, seconds in wishes:
        before = team.n
        for after in team.wish(*[wished] * seconds):
            assert 2 <= after <= 6
            assert after == before or (after > before) == (wished > before)
            before = after


@pytest.mark.parametrize("loading_s", [1, 40])
def test_workers_follow_a_wave_of_traffic_without_swinging(loading_s):
    """Sessions rise, stay and fall; a worker does 16 of them in time, needs a while until it is ready, and traffic is what the scaler measures."""
    config = settings_of(most_workers=12)
    scaler, headcount = RoleScaler(config), Headcount(config)
    ready_at = [0.0, 0.0]
    changes, counts = [], []
    for t in range(900):
        sessions = 4 + (96 if 60 <= t < 400 else 0)
        ready = [at for at in ready_at if at <= t]
        running = sessions / len(ready)
        step_s = 0.03 + 0.002 * running
        workers = [
            RoleWorker(
                f"w{i}",
                *BOTH,
                prefill_tokens_per_s=10_000.0,
                running=round(running),
                step_s=step_s,
                row_s=0.002,
            )
            for i in range(len(ready))
        ]
        scaler.on_window(Window(workers, 1.0, [100] * sessions, (), [step_s]), float(t))
        change = headcount.on_wish(scaler.wished, len(ready_at), float(t))
        ready_at = ready_at[:-1] if change < 0 else [*ready_at, *[t + loading_s] * change]
        changes += [change] if change else []
        counts.append(len(ready_at))
    assert 5 <= max(counts) <= 12
    assert counts[59] == 2 and counts[-1] <= 3
    assert changes == sorted(changes, reverse=True), "up, and later down"
