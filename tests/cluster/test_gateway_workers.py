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


def test_time_of_a_step_is_measured_where_every_step_gave_a_token() -> None:
    w = worker("a")
    w.on_status(status(0, seconds=0.0))
    w.on_status(status(10, seconds=0.2, out=10))
    assert w.step_s == pytest.approx(0.02)
    w.on_status(status(12, seconds=8.2, out=10))
    assert w.step_s == pytest.approx(0.02), "chunks of a prompt say nothing of it"


def test_rate_of_prompts_is_that_of_the_tokens_that_were_computed() -> None:
    w = worker("a")
    w.on_status(status(0, seconds=0.0))
    assert w.prefill_tokens_per_s == 0.0
    for i in range(1, 6):
        w.on_status(status(i, seconds=0.5 * i, prompt=50.0 * i))
    assert w.prefill_tokens_per_s == pytest.approx(100.0)


def test_decode_rows_beside_a_prompt_do_not_count_as_its_time() -> None:
    w = worker("a")
    w.on_status(status(0, seconds=0.0))
    w.on_status(status(10, seconds=0.2, out=10))
    w.on_status(status(20, seconds=1.4, prompt=100, out=20))
    assert w.prefill_tokens_per_s == pytest.approx(100.0)
    w.on_status(status(30, seconds=1.6, prompt=100, out=30))
    assert w.prefill_tokens_per_s == pytest.approx(100.0)
    assert w.step_s == pytest.approx(0.02)


def test_rate_follows_a_worker_that_becomes_slower() -> None:
    w, seconds = worker("a"), 0.0
    for i in range(100):
        seconds += 0.5 if i < 50 else 5.0
        w.on_status(status(i, seconds=seconds, prompt=50.0 * i))
    assert w.prefill_tokens_per_s == pytest.approx(10.0, rel=0.1)


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


@pytest.mark.parametrize("counts", [(0, 0, 0), (0, 1, 0), (0, 0, 2), (-1, 1, 1), (257, 0, 0)])
def test_deployment_without_workers_for_all_work_is_refused(counts: tuple[int, int, int]) -> None:
    workers, prefill, decode = counts
    with pytest.raises(ConfigError, match="worker"):
        check(config(workers=workers, prefill=prefill, decode=decode))
