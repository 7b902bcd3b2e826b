"""What is measured of requests, and what shares of workers become of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from sim_cluster import SimCluster

from kilat.base.errors import ConfigError
from kilat.cluster.config import ServeConfig, check
from kilat.cluster.gateway.roles import Roles, role_worker
from kilat.policy.route.views import WorkerView
from kilat.policy.scale.config import ScaleConfig
from kilat.policy.scale.roles import RoleScaler, Weights
from kilat.policy.scale.window import Window

pytestmark = pytest.mark.logic


@dataclass(eq=False)
class One:
    """A request as far as it is measured."""

    arrival_s: float = 0.0
    first_at_s: float | None = None
    last_at_s: float | None = None
    output_tokens: int = 0
    n_samples: int = 1


class Recorder:
    """Stands for the scaler: keeps what it is told."""

    def __init__(self, answer: Weights | None = None) -> None:
        self.windows: list[Window] = []
        self.answer = answer

    def on_window(self, window: Window, now_s: float) -> Weights | None:
        self.windows.append(window)
        return self.answer


def window_of(requests: Sequence[One], *, at_s: float = 1.0) -> Window:
    scaler = Recorder()
    roles = Roles(scaler, SimCluster([(1.0, 1.0)]).gateway, 0.0)  # type: ignore[arg-type]
    assert roles.tick(requests, at_s) is None
    (window,) = scaler.windows
    return window


def test_time_to_first_token_is_told_once_and_that_of_later_tokens_per_window() -> None:
    scaler = Recorder()
    roles = Roles(scaler, SimCluster([(1.0, 1.0)]).gateway, 0.0)  # type: ignore[arg-type]
    one = One(arrival_s=0.1, first_at_s=0.4, last_at_s=0.9, output_tokens=6)
    roles.tick([one], 1.0)
    one.last_at_s, one.output_tokens = 2.0, 11
    roles.tick([one], 2.0)
    first, second = scaler.windows
    assert first.ttft_s == [pytest.approx(0.3)] and second.ttft_s == []
    assert first.tpot_s == [pytest.approx(0.1)] and second.tpot_s == [pytest.approx(0.2)]


def test_samples_of_a_request_are_written_side_by_side() -> None:
    window = window_of([One(first_at_s=0.0, last_at_s=1.0, output_tokens=24, n_samples=4)])
    assert window.tpot_s == [pytest.approx(0.2)]


def test_request_without_a_token_says_nothing() -> None:
    window = window_of([One(), One(first_at_s=0.5, last_at_s=0.5, output_tokens=1)])
    assert window.ttft_s == [0.5] and window.tpot_s == []


def test_pages_of_prompts_that_wait_count_as_used() -> None:
    view = WorkerView("w", n_pages=100, free_pages=70, queued_prompt_tokens=100)
    assert role_worker(view, page_tokens=16).pages_used == 37


def test_request_that_ends_within_a_window_is_measured_too() -> None:
    scaler = Recorder()
    roles = Roles(scaler, SimCluster([(1.0, 1.0)]).gateway, 0.0)  # type: ignore[arg-type]
    roles.routed(30)
    roles.routed(12)
    roles.over(One(first_at_s=0.25, last_at_s=0.75, output_tokens=3))
    assert roles.tick([], 0.5) is None and scaler.windows == [], "the window is not over"
    roles.tick([], 1.0)
    roles.tick([], 2.0)
    first, second = scaler.windows
    assert (first.ttft_s, first.tpot_s, first.prompts) == ([0.25], [0.25], [30, 12])
    assert (second.ttft_s, second.tpot_s, second.prompts) == ([], [], [])


def test_new_weights_are_those_that_the_router_sees() -> None:
    cluster = SimCluster([(1.0, 0.0), (0.0, 1.0)])
    roles = Roles(Recorder({"w1": (0.5, 0.5), "gone": (1.0, 0.0)}), cluster.gateway, 0.0)  # type: ignore[arg-type]
    roles.tick([], 1.0)
    weights = {v.worker_id: (v.prefill_weight, v.decode_weight) for v in cluster.gateway.views()}
    assert weights == {"w0": (1.0, 0.0), "w1": (0.5, 0.5)}


def test_flood_of_prompts_moves_a_share_to_prefill() -> None:
    cluster = SimCluster([(1.0, 0.0), (0.0, 1.0), (0.0, 1.0)])
    roles = Roles(RoleScaler(ScaleConfig(1.0, 0.1)), cluster.gateway, 0.0)
    for i in range(1, 10):
        roles.routed(20_000)
        roles.tick([], float(i))
    assert sum(v.prefill_weight for v in cluster.gateway.views()) > 1.0


@pytest.mark.parametrize("targets", [(0.5, None), (None, 0.05), (0.0, 0.05)])
def test_targets_come_in_pairs_above_zero(targets: tuple[float | None, float | None]) -> None:
    config = ServeConfig(
        files=None, engine=None, served_model_name="m", ttft_slo_s=targets[0], tpot_slo_s=targets[1]
    )  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"ttft|tpot"):
        check(config)
