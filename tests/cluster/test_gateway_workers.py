"""What the gateway makes of hellos and statuses."""

import pytest
from sim_cluster import LAYOUT

from kilat.base import metrics as names
from kilat.base.errors import ConfigError
from kilat.cluster.config import Place, ServeConfig, check, places
from kilat.cluster.gateway.workers import Workers, WorkerState
from kilat.policy.route.loads import Loads
from kilat.wire.kv import Endpoint
from kilat.wire.messages import Hello, Status

pytestmark = pytest.mark.logic


def worker(name: str, weights: tuple[float, float] = (1.0, 1.0), *, ready: bool = True) -> WorkerState:
    made = WorkerState(name, name, weights, 0.0)
    if ready:
        made.hello = Hello(
            name, "m", 64, 8, 100, 4, 16, [], "k", {}, LAYOUT, [Endpoint("shm", name.encode())]
        )
    return made


def status(step: int, *, seconds: float, prompt: float = 0, out: float = 0, **gauges: float) -> Status:
    counters = {names.STEP_SECONDS: seconds, names.PREFILL_TOKENS: prompt, names.OUTPUT_TOKENS: out}
    return Status(step, True, False, counters, gauges)


def crew(*members: WorkerState) -> Workers:
    made = Workers()
    for w in members:
        made.add(w)
    return made


def test_server_is_ready_when_both_kinds_of_work_have_a_worker_and_stays_so_with_one() -> None:
    prefill, decode = worker("p", (1.0, 0.0)), worker("d", (0.0, 1.0), ready=False)
    both = crew(prefill, decode)
    assert not both.ready
    decode.hello = prefill.hello
    assert both.ready
    both.remove("p")
    assert both.ready, "the other one can do it all"
    both.remove("d")
    assert not both.ready


def test_nobody_waits_for_a_worker_that_was_given_up() -> None:
    alone = crew(worker("d", (0.0, 1.0)))
    assert not alone.ready
    alone.settle()
    assert alone.ready


def test_worker_that_leaves_is_no_choice_for_the_router() -> None:
    a, b, c = worker("a"), worker("b"), worker("c", ready=False)
    a.retiring = True
    all_three = crew(a, b, c)
    assert [v.worker_id for v in all_three.views(Loads())] == ["b"]
    b.on_status(Status(1, True, True, {}, {}))
    assert all_three.views(Loads()) == [] and (a.word, b.word, c.word) == ("draining", "draining", "starting")


def test_pages_move_between_equal_layouts_only() -> None:
    a, b = worker("a"), worker("b")
    two = crew(a, b)
    assert two.can_move("a", "b") and not two.can_move("a", "a") and not two.can_move("a", "gone")
    assert b.hello is not None
    b.hello = Hello(**{f: getattr(b.hello, f) for f in b.hello.__struct_fields__} | {"layout": None})
    assert not two.can_move("a", "b") and not two.can_move("b", "a")


def test_view_has_the_pages_of_the_last_status_and_the_load_of_this_moment() -> None:
    w, loads = worker("a", (0.25, 0.75)), Loads()
    assert w.view(loads).free_pages == 16, "all of them, before it said anything"
    w.on_status(status(1, seconds=0.1, **{names.PAGES_FREE: 3.0, names.PAGES_CACHED: 4.0}))
    loads.sent("s", "a", None, 50)
    view = w.view(loads)
    assert (view.free_pages, view.n_pages, view.waiting, view.queued_prompt_tokens) == (7, 16, 1, 50)
    assert (view.prefill_weight, view.decode_weight, view.max_running) == (0.25, 0.75, 8)


def fed(w: WorkerState, *work: tuple[int, int, int], slow: float = 1.0) -> None:
    """Statuses after so many (steps, prompt tokens, rows) each: 10 ms a step, 1 ms a token, 2 ms a row, ``slow`` times that."""
    total, seconds = [0, 0, 0], 0.0
    w.on_status(status(0, seconds=0.0))
    for counts in work:
        total = [a + b for a, b in zip(total, counts)]
        seconds += slow * sum(n * s for n, s in zip(counts, (0.01, 0.001, 0.002)))
        w.on_status(status(total[0], seconds=seconds, prompt=total[1], out=total[2]))


KINDS = ((10, 0, 10), (10, 500, 0), (10, 0, 90), (10, 300, 40), (30, 0, 60)) * 4


def test_steps_of_a_view_are_those_of_the_sessions_that_it_has_now() -> None:
    w, loads = worker("a"), Loads()
    crew(w)
    fed(w, *KINDS)
    assert w.view(loads).step_s == pytest.approx(0.012, rel=0.05), (
        "at least one, for it is asked for a new one"
    )
    for i in range(20):
        loads.sent(f"s{i}", "a", None, 0)
        loads.first_token(f"s{i}")
    view = w.view(loads)
    assert view.step_s == pytest.approx(0.05, rel=0.05)
    assert view.row_s == pytest.approx(0.002, rel=0.05)
    assert view.prefill_tokens_per_s == pytest.approx(1000.0, rel=0.05)


def test_what_a_worker_has_not_done_yet_is_known_from_the_others() -> None:
    a, b = worker("a"), worker("b")
    crew(a, b)
    assert a.view(Loads()).prefill_tokens_per_s == 0.0 and a.view(Loads()).step_s == 0.0
    fed(b, *KINDS)
    assert a.view(Loads()).prefill_tokens_per_s == pytest.approx(
        b.view(Loads()).prefill_tokens_per_s, rel=0.01
    )
    assert a.view(Loads()).prefill_tokens_per_s > 0


def test_worker_that_is_slower_than_the_others_is_known_to_be() -> None:
    a, b = worker("a"), worker("b")
    crew(a, b)
    for _ in range(3):
        fed(a, *KINDS)
        fed(b, *KINDS, slow=2.0)
    ratio = a.view(Loads()).prefill_tokens_per_s / b.view(Loads()).prefill_tokens_per_s
    assert ratio == pytest.approx(2.0, rel=0.2)


def test_idle_time_and_a_status_without_a_step_say_nothing() -> None:
    w = worker("a")
    crew(w)
    fed(w, *KINDS)
    before = w.view(Loads())
    n_steps, prompt, out = (float(sum(k[i] for k in KINDS)) for i in range(3))
    w.on_status(status(int(n_steps), seconds=99.0, prompt=prompt, out=out))
    w.on_status(status(int(n_steps), seconds=99.0, prompt=prompt, out=out))
    assert w.view(Loads()) == before


def test_totals_keep_what_dead_workers_have_counted_and_add_up_the_living() -> None:
    a, b = worker("a"), worker("b")
    two = crew(a, b)
    a.on_status(status(1, seconds=0.5, out=5, **{names.STEP_AGE: 2.0, names.PAGES_FREE: 1.0}))
    b.on_status(status(1, seconds=0.5, out=7, **{names.STEP_AGE: 1.0, names.PAGES_FREE: 2.0}))
    assert two.counters()[names.OUTPUT_TOKENS] == 12
    assert (two.gauges()[names.PAGES_FREE], two.gauges()[names.STEP_AGE]) == (3.0, 2.0)
    two.remove("a")
    assert two.counters()[names.OUTPUT_TOKENS] == 12
    assert two.gauges()[names.PAGES_FREE] == 2.0


def config(**fields: object) -> ServeConfig:
    return ServeConfig(files=None, engine=None, served_model_name="m", **fields)  # type: ignore[arg-type]


def test_lone_worker_has_all_cores() -> None:
    assert places(config(), [0, 1, 2]) == [Place("worker-0", 1.0, 1.0)]


def test_several_workers_share_the_cores_evenly() -> None:
    found = places(config(workers=1, prefill=1, decode=1), [0, 2, 3, 5, 7, 8, 9])
    assert [(p.name, p.cores) for p in found] == [
        ("worker-0", (0, 2)),
        ("prefill-0", (3, 5)),
        ("decode-0", (7, 8, 9)),
    ]


def test_more_workers_than_cores_have_one_each() -> None:
    assert [p.cores for p in places(config(workers=4), [3, 6])] == [(3,), (3,), (6,), (6,)]


def test_workers_take_the_devices_in_turn_and_see_the_others_behind_their_own() -> None:
    found = places(config(workers=3), [0, 1, 2], ["4", "7"])
    assert [p.devices for p in found] == [("4", "7"), ("7", "4"), ("4", "7")]
    assert places(config(), [0], ["4", "7"])[0].devices == (), "a lone one takes what it finds"
    assert [p.devices for p in places(config(workers=2), [0, 1])] == [(), ()]


TARGETS = {"ttft_slo_s": 1.0, "tpot_slo_s": 0.1}


def test_places_are_divided_for_all_workers_that_there_may_be() -> None:
    found = places(config(workers=1, prefill=1, decode=1, max_workers=5, **TARGETS), list(range(10)), ["0"])
    assert [p.name for p in found] == ["worker-0", "prefill-0", "decode-0", "worker-1", "worker-2"]
    assert [p.cores for p in found] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    assert (found[4].prefill_weight, found[4].decode_weight) == (1.0, 1.0)


def test_number_of_workers_follows_targets_only_within_its_bounds() -> None:
    scale = config(workers=2, max_workers=4, shrink_after_s=9.0, **TARGETS).scale
    assert scale is not None and (scale.least_workers, scale.most_workers, scale.fewer_after) == (2, 4, 9)
    check(config(workers=2, max_workers=2, **TARGETS))
    with pytest.raises(ConfigError, match="max_workers is 1, allowed 2"):
        check(config(workers=2, max_workers=1, **TARGETS))
    with pytest.raises(ConfigError, match="without targets"):
        check(config(workers=2, max_workers=4))


@pytest.mark.parametrize("counts", [(0, 0, 0), (0, 1, 0), (0, 0, 2), (-1, 1, 1), (257, 0, 0)])
def test_deployment_without_workers_for_all_work_is_refused(counts: tuple[int, int, int]) -> None:
    workers, prefill, decode = counts
    with pytest.raises(ConfigError, match="worker"):
        check(config(workers=workers, prefill=prefill, decode=decode))


def test_each_worker_is_told_of_at_its_own_speed() -> None:
    quick, slow = worker("quick"), worker("slow")
    crew(quick, slow)
    for k in range(1, 40):
        quick.on_status(status(10 * k, seconds=0.1 * k, out=100.0 * k))
        slow.on_status(status(10 * k, seconds=0.3 * k, out=100.0 * k))
    assert slow.step_s(10) > 2 * quick.step_s(10) > 0
    for w in (quick, slow):
        view = w.view(Loads())
        assert (view.step_s, view.prefill_tokens_per_s) == (w.step_s(0), w.prefill_tokens_per_s)
