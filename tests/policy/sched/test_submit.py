"""What the scheduler takes and refuses at the door."""

import pytest

from kilat.base.errors import CapacityError, ConfigError, LimitError, RequestError
from kilat.policy.sched.config import SchedulerConfig
from tests.policy.sched.fakes import Rig

pytestmark = pytest.mark.logic


def test_session_without_seed_is_refused():
    with pytest.raises(RequestError, match="seed") as e:
        Rig().submit("a", [1, 2], seed=None)
    assert e.value.param == "seed"


def test_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="0 tokens"):
        Rig().submit("a", [])


@pytest.mark.parametrize("ids", [[2**31], [1, None], ["1"], [1.5]])
@pytest.mark.parametrize("field", ["prompt_ids", "output_ids"])
def test_ids_that_cannot_be_hashed_are_refused(field: str, ids: list):
    rig = Rig()
    with pytest.raises(RequestError, match="32-bit"):
        rig.submit("a", ids) if field == "prompt_ids" else rig.submit("a", [1], output_ids=ids)
    assert not rig.scheduler.has_work


def test_longest_prompt_leaves_room_for_one_token():
    rig = Rig(max_model_len=10)
    with pytest.raises(LimitError, match=r"prompt has 10 tokens, limit 9: .*--max-model-len"):
        rig.submit("a", range(10))
    rig.submit("a", range(9), max_tokens=None)
    rig.run()
    assert len(rig.output["a"]) == 1 and rig.finish["a"] == "length"


def test_prompt_that_the_whole_pool_cannot_hold_is_refused():
    with pytest.raises(LimitError, match=r"limit 11: .*memory for KV pages"):
        Rig(n_pages=3, page_tokens=4).submit("a", range(12))


def test_session_that_outgrows_the_pool_ends_with_length():
    rig = Rig(n_pages=3, page_tokens=4)
    rig.submit("a", range(5), max_tokens=100)
    rig.run()
    assert len(rig.output["a"]) == 7 and rig.finish["a"] == "length"


def test_id_of_a_live_session_is_refused_and_free_again_afterwards():
    rig = Rig()
    rig.submit("a", [1], n=2)
    for other in ("a", "a#1"):
        with pytest.raises(RequestError, match="live"):
            rig.submit(other, [2])
    rig.run()
    rig.finish.clear()
    rig.events.clear()
    rig.submit("a", [1])
    rig.run()
    assert rig.finish["a"] == "length"


def test_refused_id_leaves_the_live_session_alone():
    rig = Rig()
    rig.submit("a#1", [1])
    with pytest.raises(RequestError):
        rig.submit("a", [1], n=2)
    assert rig.gauge("kilat_sessions_waiting") == 1
    rig.run()
    assert set(rig.finish) == {"a#1"}


def test_sample_number_outside_n_is_refused():
    with pytest.raises(RequestError, match="sample 2"):
        Rig().submit("a#2", [1], branch=2, n=2)


def test_full_queue_refuses_with_429_and_a_time_to_come_back():
    rig = Rig(max_num_seqs=1, max_waiting=2)
    for i in range(3):  # one that can start at once and two that wait
        rig.submit(f"s{i}", [1])
    with pytest.raises(CapacityError, match=r"3 sessions are waiting, limit 2") as e:
        rig.submit("late", [1])
    assert e.value.status == 429 and e.value.retryable and 1 <= e.value.retry_after_s <= 60
    rig.run()
    assert set(rig.finish) == {"s0", "s1", "s2"}


def test_queue_of_zero_still_takes_what_can_start_at_once():
    rig = Rig(max_num_seqs=2, max_waiting=0)
    rig.submit("a", [1])
    rig.submit("b", [1])
    with pytest.raises(CapacityError):
        rig.submit("c", [1])
    rig.step()
    with pytest.raises(CapacityError):
        rig.submit("c", [1])
    rig.run()
    rig.submit("c", [1])


def test_slower_finishing_sessions_mean_a_later_retry():
    waits = []
    for seconds in (0.1, 10.0):
        rig = Rig(max_num_seqs=1, max_waiting=8)
        for i in range(9):
            rig.submit(f"s{i}", [1], max_tokens=1)
        for _ in range(4):
            rig.step()
            rig.now_s += seconds
        for i in range(4):
            rig.submit(f"t{i}", [1])
        with pytest.raises(CapacityError) as e:
            rig.submit("late", [1])
        waits.append(e.value.retry_after_s)
    assert 1 <= waits[0] < waits[1] <= 60


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_pages": 0},
        {"page_tokens": 0},
        {"max_num_seqs": 0},
        {"max_step_tokens": 0},
        {"max_waiting": -1},
        {"depth": 0},
        {"depth": 3},
        {"max_model_len": 1},
        {"n_pages": 1, "page_tokens": 1},
        {"target_step_s": 0.0},
        {"target_step_s": float("nan")},
        {"tenant_weights": {"a": 0.0}},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict):
    right = {"n_pages": 4, "page_tokens": 4, "max_model_len": 16, "max_num_seqs": 2, "max_step_tokens": 8}
    SchedulerConfig(**right)
    with pytest.raises(ConfigError):
        SchedulerConfig(**{**right, **wrong})
