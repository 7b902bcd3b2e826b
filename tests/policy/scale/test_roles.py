"""Shares follow the pressure, slowly, and never leave a kind of work without a worker."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.base.errors import ConfigError
from kilat.policy.scale.config import ScaleConfig
from kilat.policy.scale.roles import RoleScaler
from kilat.policy.scale.window import RoleWorker, Window

pytestmark = pytest.mark.logic

RATE = 1000.0
CONFIG = ScaleConfig(ttft_slo_s=1.0, tpot_slo_s=0.1, patience=2, cool_down_s=5.0)


class Fleet:
    """Workers whose weights follow the scaler; one window per second. ``p`` and ``d`` start with one role each."""

    def __init__(self, n_prefill: int, n_decode: int, config: ScaleConfig = CONFIG) -> None:
        self.scaler = RoleScaler(config)
        self.weights = {f"p{i}": (1.0, 0.0) for i in range(n_prefill)}
        self.weights |= {f"d{i}": (0.0, 1.0) for i in range(n_decode)}
        self.options: dict[str, dict[str, object]] = {}
        self.now_s = 0.0

    def window(
        self, ttft_s: float = 0.0, tpot_s: float = 0.0, prompt_tokens: int = 0
    ) -> dict[str, tuple[float, float]] | None:
        """One second; when first tokens are late, a queue of 0.3 s stands before the prefill workers."""
        self.now_s += 1.0
        queue = {"queued_prompt_tokens": 300 if ttft_s else 0, "prefill_tokens_per_s": RATE}
        workers = [
            RoleWorker(i, p, d, **{**(queue if p >= 0.5 else {}), **self.options.get(i, {})})
            for i, (p, d) in self.weights.items()
        ]
        times = {"ttft_s": [ttft_s] * 10 if ttft_s else [], "tpot_s": [tpot_s] * 10 if tpot_s else []}
        changed = self.scaler.on_window(Window(workers, 1.0, prompt_tokens, **times), self.now_s)
        self.weights |= changed or {}
        return changed

    def shares(self) -> tuple[float, float]:
        return sum(p for p, _ in self.weights.values()), sum(d for _, d in self.weights.values())


def test_missed_ttft_moves_a_share_to_prefill_after_two_windows():
    fleet = Fleet(1, 3)
    assert fleet.window(ttft_s=2.0, tpot_s=0.03) is None
    changed = fleet.window(ttft_s=2.0, tpot_s=0.03)
    assert changed and all(i.startswith("d") for i in changed)
    assert fleet.shares()[0] > 1


def test_missed_tpot_moves_a_share_to_decode():
    fleet = Fleet(3, 1)
    fleet.window(ttft_s=0.2, tpot_s=0.2)
    changed = fleet.window(ttft_s=0.2, tpot_s=0.2)
    assert changed and all(i.startswith("p") for i in changed)


def test_nothing_moves_while_both_targets_are_met():
    fleet = Fleet(2, 2)
    assert [fleet.window(ttft_s=0.7, tpot_s=0.01) for _ in range(10)] == [None] * 10


def test_nothing_moves_when_both_sides_miss_alike():
    fleet = Fleet(2, 2)
    assert [fleet.window(ttft_s=3.0, tpot_s=0.3) for _ in range(10)] == [None] * 10


def test_one_bad_window_is_not_enough():
    fleet = Fleet(2, 2)
    answers = [fleet.window(ttft_s=t, tpot_s=0.02) for t in (3.0, 0.1, 3.0, 0.1, 3.0)]
    assert answers == [None] * 5


def test_a_wish_that_turns_round_starts_to_count_again():
    fleet = Fleet(2, 2)
    assert fleet.window(ttft_s=3.0, tpot_s=0.02) is None
    assert fleet.window(ttft_s=0.1, tpot_s=0.4) is None
    assert fleet.window(ttft_s=0.1, tpot_s=0.4) is not None


def test_after_a_change_there_is_a_cool_down():
    fleet = Fleet(1, 7)
    changes = [fleet.now_s for _ in range(20) if fleet.window(ttft_s=1.6, tpot_s=0.05)]
    assert len(changes) > 1
    assert min(b - a for a, b in pairwise(changes)) >= CONFIG.cool_down_s


def test_a_queue_counts_before_any_first_token_is_late():
    fleet = Fleet(1, 3)
    fleet.options["p0"] = {"queued_prompt_tokens": 8000, "prefill_tokens_per_s": 2000.0}
    fleet.window(tpot_s=0.02)
    assert fleet.window(tpot_s=0.02)


def test_more_prompts_than_prefill_can_compute_count_before_there_is_a_queue():
    fleet = Fleet(1, 3)
    fleet.window(tpot_s=0.02, prompt_tokens=2000)
    changed = fleet.window(tpot_s=0.02, prompt_tokens=2000)
    assert changed and fleet.shares()[0] >= 1.5
    calm = Fleet(1, 3)
    assert [calm.window(tpot_s=0.02, prompt_tokens=700) for _ in range(5)] == [None] * 5


def test_late_first_tokens_without_a_queue_are_the_past():
    fleet = Fleet(1, 3)
    fleet.options["p0"] = {"queued_prompt_tokens": 0, "prefill_tokens_per_s": RATE}
    assert [fleet.window(ttft_s=9.0, tpot_s=0.02) for _ in range(5)] == [None] * 5


def test_sessions_beyond_the_places_of_decode_count_as_pressure():
    fleet = Fleet(3, 1)
    fleet.options["d0"] = {"running": 30, "max_running": 16}
    fleet.window(ttft_s=0.2, tpot_s=0.05)
    assert fleet.window(ttft_s=0.2, tpot_s=0.05)


def test_the_least_busy_worker_gives_up_its_role():
    fleet = Fleet(1, 3)
    fleet.options |= {"d0": {"running": 9}, "d1": {"running": 1}, "d2": {"running": 5}}
    fleet.window(ttft_s=1.2, tpot_s=0.05)
    assert set(fleet.window(ttft_s=1.2, tpot_s=0.05)) == {"d1"}


def test_draining_workers_are_left_alone_and_do_not_count():
    fleet = Fleet(1, 2)
    fleet.options["d0"] = {"draining": True}
    for _ in range(30):
        changed = fleet.window(ttft_s=9.0, tpot_s=0.001)
        assert "d0" not in (changed or {})
    assert fleet.weights["d1"][1] >= 0.5


def test_the_last_worker_able_to_decode_keeps_half_of_itself():
    fleet = Fleet(2, 2)
    for _ in range(60):
        fleet.window(ttft_s=50.0, tpot_s=0.001)
    assert fleet.shares() == (3.5, 0.5)
    for _ in range(60):
        fleet.window(ttft_s=0.001, tpot_s=50.0)
    assert fleet.shares() == (0.5, 3.5)


@pytest.mark.parametrize("n_prefill, n_decode", [(3, 0), (0, 3)])
def test_a_kind_of_work_without_a_worker_gets_one_at_once(n_prefill, n_decode):
    fleet = Fleet(n_prefill, n_decode)
    assert fleet.window() is not None
    assert min(fleet.shares()) == 0.5


def test_a_single_worker_does_both():
    fleet = Fleet(1, 0)
    assert fleet.window() == {"p0": (0.5, 0.5)}
    assert [fleet.window(ttft_s=9.0) for _ in range(20)] == [None] * 20


def test_unified_workers_with_full_weights_count_as_half_and_half():
    fleet = Fleet(0, 0)
    fleet.weights = {f"w{i}": (1.0, 1.0) for i in range(4)}
    assert [fleet.window(ttft_s=0.5, tpot_s=0.05) for _ in range(5)] == [None] * 5
    fleet.window(ttft_s=4.0, tpot_s=0.02)
    changed = fleet.window(ttft_s=4.0, tpot_s=0.02)
    assert changed and set(changed.values()) == {(1.0, 0.0)}


def test_nobody_there_is_no_reason_to_fail():
    assert RoleScaler(CONFIG).on_window(Window([]), 0.0) is None


def test_the_quantile_decides_not_the_worst():
    scaler = RoleScaler(CONFIG)
    workers = [RoleWorker("p0", 1.0, 0.0, 300, RATE), RoleWorker("d0", 0.0, 1.0)]
    assert scaler.pressures(Window(workers, ttft_s=[0.5] * 9 + [30.0]))[0] == 0.5
    assert scaler.pressures(Window(workers, ttft_s=[0.5] * 8 + [30.0] * 2))[0] == 30.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"ttft_slo_s": 0},
        {"tpot_slo_s": -1},
        {"quantile": 0},
        {"quantile": 1.1},
        {"ratio": 0.5},
        {"patience": 0},
        {"cool_down_s": -1},
        {"act_above": float("nan")},
    ],
)
def test_settings_without_sense_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ScaleConfig(**{"ttft_slo_s": 1.0, "tpot_slo_s": 0.1, **wrong})


TIMES = st.tuples(st.sampled_from([0.0, 0.3, 0.9, 1.5, 20.0]), st.sampled_from([0.0, 0.01, 0.09, 0.15, 4.0]))
EVENTS = st.lists(st.tuples(TIMES, st.sampled_from(["", "", "die", "join", "drain"])), max_size=40)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 6), EVENTS)
def test_whatever_happens_both_kinds_of_work_keep_a_worker(n_prefill, n_decode, events):
    fleet = Fleet(n_prefill, n_decode)
    for k, ((ttft_s, tpot_s), event) in enumerate(events):
        if event == "die" and len(fleet.weights) > 1:
            fleet.weights.popitem()
        elif event == "join":
            fleet.weights[f"n{k}"] = (0.0, 1.0)
        elif event == "drain" and len([i for i in fleet.weights if i not in fleet.options]) > 1:
            fleet.options[next(i for i in fleet.weights if i not in fleet.options)] = {"draining": True}
        before = dict(fleet.weights)
        changed = fleet.window(ttft_s, tpot_s) or {}
        assert all(before[i] != w and sum(w) == 1.0 and min(w) >= 0 for i, w in changed.items())
        able = [w for i, w in fleet.weights.items() if i not in fleet.options]
        assert sum(p for p, _ in able) >= 0.5 or not able
        assert sum(d for _, d in able) >= 0.5 or not able
