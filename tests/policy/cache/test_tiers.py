"""Whether pages in tiers are read or computed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.policy.cache.pool import PagePool
from kilat.policy.cache.tiers import START_S, TierRates

pytestmark = pytest.mark.logic

MS = 0.001


def rates(**ms: float) -> TierRates:
    return TierRates({tier: value * MS for tier, value in ms.items()})


def test_pages_are_read_when_that_is_cheaper_than_computing_them() -> None:
    disk = rates(disk=1.0)
    assert disk.n_worth_reading(["disk"] * 10, 5 * MS) == 10
    assert disk.n_worth_reading(["disk"] * 10, 0.5 * MS) == 0
    assert disk.n_worth_reading([], 5 * MS) == 0


def test_unknown_step_rate_reads() -> None:
    assert rates(disk=1000.0).n_worth_reading(["disk"] * 3, None) == 3


def test_one_page_is_not_worth_the_start() -> None:
    page_s = START_S / 2
    assert rates(disk=0.0).n_worth_reading(["disk"], page_s) == 0
    assert rates(disk=0.0).n_worth_reading(["disk"] * 3, page_s) == 3


def test_reads_that_go_first_count() -> None:
    disk = rates(disk=1.0)
    assert disk.n_worth_reading(["disk"] * 10, 2 * MS, queue_s=20 * MS) == 0
    assert disk.n_worth_reading(["disk"] * 10, 2 * MS, queue_s=5 * MS) == 10


def test_chain_is_read_up_to_where_it_no_longer_pays() -> None:
    both = rates(host=0.1, disk=5.0)
    assert both.n_worth_reading(["host"] * 5 + ["disk"] * 5, 1 * MS) == 5
    # a dear page in the middle is worth it when enough cheap ones follow
    assert both.n_worth_reading(["host"] * 5 + ["disk"] + ["host"] * 9, 1 * MS) == 15
    assert both.n_worth_reading(["host"] * 5 + ["disk"] + ["host"] * 3, 1 * MS) == 5


def test_measurements_move_the_rate_and_being_passed_over_moves_it_back() -> None:
    disk = rates(disk=1.0)
    for _ in range(30):
        disk.measured("disk", 10, 10 * 20 * MS)
    assert disk.page_s("disk") > 19 * MS
    assert disk.n_worth_reading(["disk"] * 10, 5 * MS) == 0
    n = 0
    while disk.n_worth_reading(["disk"] * 10, 5 * MS) == 0:
        n += 1
        assert n < 200, "a tier that was slow once is never asked again"
    assert n > 10
    disk.measured("disk", 0, 1.0)
    assert disk.seconds(["disk", "disk"]) == pytest.approx(2 * disk.page_s("disk"))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(["host", "disk"]), max_size=8),
    st.floats(0.0, 4.0),
    st.floats(0.1, 3.0),
    st.floats(0.1, 9.0),
)
def test_choice_saves_as_much_time_as_any_other(
    tiers: list[str], compute_ms: float, host_ms: float, disk_ms: float
) -> None:
    def saved_s(n: int) -> float:
        read_s = sum({"host": host_ms, "disk": disk_ms}[t] * MS for t in tiers[:n])
        return n * compute_ms * MS - read_s - (START_S if n else 0.0)

    n = rates(host=host_ms, disk=disk_ms).n_worth_reading(tiers, compute_ms * MS)
    assert saved_s(n) >= max(saved_s(k) for k in range(len(tiers) + 1)) - 1e-12


def test_pool_tells_of_a_page_before_its_content_is_lost() -> None:
    pool = PagePool(2, 4)
    evicted: list[tuple[bytes, int]] = []
    pool.on_evict = lambda name, page: evicted.append((name, page))
    first, second = pool.take(), pool.take()
    assert first is not None and second is not None
    pool.seal(first, b"a")
    pool.release([first])
    assert not evicted  # it can still be found
    assert pool.take() == first
    assert evicted == [(b"a", first)]
    pool.release([second])
    assert pool.take() == second  # it had no name
    assert len(evicted) == 1
