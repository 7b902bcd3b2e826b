"""Busy share and named gaps of recorded spans."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.engine.timeline import COMMIT, INPUTS, LAUNCH, NO_REQUESTS, READ_BACK, SCHEDULE
from kilat.engine.utilisation import (
    BETWEEN,
    COPYING,
    UNKNOWN,
    DeviceUse,
    Phase,
    Roofs,
    Share,
    Span,
    Steps,
    device_use,
    utilisation,
)

pytestmark = pytest.mark.logic

STEP = [
    Phase(0, 10, SCHEDULE),
    Phase(10, 20, INPUTS),
    Phase(20, 30, LAUNCH),
    Phase(30, 90, READ_BACK),
    Phase(90, 100, COMMIT),
]


def kernel(begin: int, end: int, queued: int | None = None, name: str = "gemm") -> Span:
    return Span(begin, end, name, queued)


def test_step_in_line_waits_for_each_of_the_hosts_phases() -> None:
    use = device_use([kernel(34, 60, 28), kernel(62, 80, 28)], STEP, 0, 100)
    assert (use.wall_ns, use.busy_ns) == (100, 44)
    assert use.gaps_ns == {
        SCHEDULE: 10,
        INPUTS: 10,
        LAUNCH: 8,  # until the call of the launch was over at 28
        BETWEEN: 6 + 2,  # from there to the first kernel, and between the kernels of one launch
        READ_BACK: 10,
        COMMIT: 10,
    }


def test_steps_launched_ahead_leave_no_gap_to_the_host() -> None:
    spans = [kernel(-50, 49, -60), kernel(50, 130, 28)]
    use = device_use(spans, STEP, 0, 100)
    assert (use.busy_ns, use.gaps_ns) == (99, {BETWEEN: 1})


def test_gap_after_the_last_launch_is_the_hosts() -> None:
    phases = [Phase(0, 40, COMMIT), Phase(40, 100, NO_REQUESTS)]
    use = device_use([kernel(0, 30, -5)], phases, 0, 100)
    assert use.gaps_ns == {NO_REQUESTS: 60, COMMIT: 10}
    # the next kernel lies beyond the window, but it had been launched within it
    use = device_use([kernel(0, 30, -5), kernel(120, 130, 70)], phases, 0, 100)
    assert use.gaps_ns == {COMMIT: 10, NO_REQUESTS: 30, BETWEEN: 30}


def test_copies_are_not_busy_and_name_the_time_in_which_nothing_else_runs() -> None:
    spans = [Span(5, 15, "Memcpy HtoD", 4, copy=True), kernel(12, 40, 4), kernel(60, 100, None)]
    use = device_use(spans, STEP, 0, 100)
    assert use.busy_ns == 68
    assert use.gaps_ns == {COPYING: 7, SCHEDULE: 4, BETWEEN: 1, READ_BACK: 20}
    assert [name for name, _, _ in use.kernels] == ["gemm"]


def test_kernels_that_overlap_are_busy_once_and_count_each() -> None:
    spans = [kernel(-10, 20, name="a"), kernel(10, 40, name="b"), kernel(15, 20, name="b"), kernel(90, 120)]
    use = device_use(spans, [], 0, 100)
    assert use.busy_ns == 50 and use.gaps_ns == {UNKNOWN: 50}
    assert use.kernels == [("b", 35, 2), ("a", 20, 0), ("gemm", 10, 1)]


def test_window_without_a_kernel_is_all_gap() -> None:
    use = device_use([], STEP, 0, 100)
    assert use.busy_ns == 0 and sum(use.gaps_ns.values()) == 100 and use.gaps_ns[READ_BACK] == 60


spans = st.lists(
    st.builds(
        lambda begin, n, wait, copy: Span(
            begin, begin + n, "k", wait if wait is None else begin - wait, copy
        ),
        st.integers(-30, 130),
        st.integers(0, 40),
        st.none() | st.integers(-5, 60),
        st.booleans(),
    ),
    max_size=8,
)


@given(spans=spans, ends=st.lists(st.integers(-20, 120), min_size=2, max_size=6, unique=True))
def test_busy_time_and_named_gaps_are_the_whole_window(spans: list[Span], ends: list[int]) -> None:
    ends.sort()
    phases = [Phase(a, b, f"p{i}") for i, (a, b) in enumerate(pairwise(ends))]
    use = device_use(spans, phases, 0, 100)
    runs = [any(s.begin_ns <= t < s.end_ns for s in spans if not s.copy) for t in range(100)]
    copies = [any(s.begin_ns <= t < s.end_ns for s in spans if s.copy) for t in range(100)]
    assert use.busy_ns == sum(runs)
    assert use.busy_ns + sum(use.gaps_ns.values()) == 100
    assert all(ns > 0 for ns in use.gaps_ns.values())
    assert use.gaps_ns.get(COPYING, 0) == sum(c and not r for c, r in zip(copies, runs))
    for p in phases:
        alone = sum(not runs[t] and not copies[t] for t in range(max(p.begin_ns, 0), min(p.end_ns, 100)))
        assert use.gaps_ns.get(p.name, 0) <= alone


STEPS = Steps(n=4, wall_ns=40_000_000, rows=256, tokens=300, read_bytes=4e9, flops=8e12)
ROOFS = Roofs(copy_bytes_per_s=200e9, product_flops_per_s=1000e12, product="bfloat16 8192^3")


def test_shares_are_of_the_steps_without_a_profiler_and_busy_of_those_under_it() -> None:
    use = DeviceUse(30_000_000, 24_000_000, {SCHEDULE: 6_000_000}, [("gemm", 20_000_000, 10)])
    u = utilisation("H200", "kernels", STEPS, (2, use), ROOFS)
    assert (u.steps, u.rows, u.tokens, u.step_ms, u.watched_step_ms) == (4, 64.0, 75.0, 10.0, 15.0)
    assert u.bandwidth_share == pytest.approx(1e9 / 0.01 / 200e9)
    assert u.arithmetic_share == pytest.approx(2e12 / 0.01 / 1000e12)
    assert u.busy_share == pytest.approx(0.8)
    assert u.gaps == [Share(SCHEDULE, 3.0, pytest.approx(0.2))]
    assert u.kernels == [Share("gemm", 10.0, pytest.approx(2 / 3), 5.0)] and u.note is None


def test_device_that_could_not_be_looked_at_has_no_busy_share_but_a_reason() -> None:
    u = utilisation("H200", "kernels", STEPS, "may not look", ROOFS)
    assert (u.busy_share, u.gaps, u.kernels, u.note) == (None, [], [], "may not look")
    assert u.watched_step_ms == u.step_ms == 10.0 and u.bandwidth_share > 0
