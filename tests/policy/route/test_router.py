"""Which workers a request gets, and what is said about it."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.base.errors import CapacityError
from kilat.policy.route.config import RouterConfig
from kilat.policy.route.router import Router
from kilat.wire.messages import PagesChanged
from tests.policy.route.fleet import decoder, holding, prefiller, request, view

pytestmark = pytest.mark.logic

BOTH = [view("w0"), view("w1"), view("w2"), view("w3")]


def choose(router, workers, r=None, now_s=0.0):
    return router.choose(r or request(), workers, now_s)


def test_the_worker_that_holds_the_prefix_gets_the_request():
    route = choose(holding(Router(), w2=60), BOTH)
    assert (route.worker, route.decode, route.lend_from) == ("w2", None, None)
    assert route.why["reason"] == "prefix held"
    assert route.why["tokens_left"] == 4 * 16 + 1


def test_a_long_queue_is_dearer_than_computing_the_prefix_again():
    router = holding(Router(RouterConfig(move_s=100.0)), w2=60)
    queue = [view("w2", queued_prompt_tokens=3000) if w.worker_id == "w2" else w for w in BOTH]
    assert choose(router, queue).worker != "w2"
    short = [view("w2", queued_prompt_tokens=500) if w.worker_id == "w2" else w for w in BOTH]
    assert choose(router, short).worker == "w2"


def test_pages_are_lent_when_moving_them_is_cheaper_than_computing():
    queue = [view("w2", queued_prompt_tokens=3000) if w.worker_id == "w2" else w for w in BOTH]
    route = choose(holding(Router(), w2=60), queue)
    assert route.worker != "w2" and route.lend_from == "w2" and route.n_lent == 60
    assert route.why["reason"] == "prefix lent by a peer"
    assert route.why["tokens_left"] == 4 * 16 + 1


def test_a_slow_link_lends_nothing():
    router = holding(Router(), w2=60)
    for _ in range(50):
        router.link.measured(60, 60 * 0.05)  # a page takes three times as long as computing it
    queue = [view("w2", queued_prompt_tokens=3000) if w.worker_id == "w2" else w for w in BOTH]
    route = choose(router, queue)
    assert route.worker != "w2" and route.lend_from is None
    assert route.why["miss"]["because"] == "the holder is dearer than computing it here"


def test_a_draining_worker_can_still_lend():
    workers = [view("w0"), view("w2", draining=True)]
    route = choose(holding(Router(), w2=60), workers)
    assert (route.worker, route.lend_from) == ("w0", "w2")
    assert route.why["refused"] == {"w2": "draining"}


def test_a_silent_worker_neither_works_nor_lends():
    workers = [view("w0", seen_s=100.0), view("w2", seen_s=90.0)]
    route = choose(holding(Router(), w2=60), workers, now_s=100.0)
    assert (route.worker, route.lend_from) == ("w0", None)
    assert route.why["refused"] == {"w2": "silent for 10.0 s"}


def test_ties_are_spread_over_all_equal_workers():
    router = Router()
    counts = Counter(choose(router, BOTH, request(f"ses-{i}")).worker for i in range(400))
    assert set(counts) == {"w0", "w1", "w2", "w3"}
    assert min(counts.values()) > 60


def test_ties_among_holders_of_one_prefix_are_spread_too():
    router = holding(Router(), w1=64, w3=64)
    counts = Counter(choose(router, BOTH, request(f"ses-{i}")).worker for i in range(200))
    assert set(counts) == {"w1", "w3"}
    assert min(counts.values()) > 60


def test_without_rates_and_prefixes_the_least_loaded_worker_is_chosen():
    workers = [
        view(f"w{i}", prefill_tokens_per_s=0.0, step_s=0.0, running=n, waiting=n // 2)
        for i, n in enumerate([9, 3, 1, 6])
    ]
    route = choose(Router(), workers)
    assert route.worker == "w2"
    assert route.why["reason"] == "least loaded"


def test_a_worker_without_room_is_passed_over_unless_all_are_full():
    full = view("w0", free_pages=10)
    assert choose(Router(), [full, view("w1", running=20)]).worker == "w1"
    route = choose(Router(), [full, view("w1", free_pages=10, running=20)])
    assert route.worker == "w0"
    assert set(route.why["refused"]) == {"w0", "w1"}


def test_pages_held_count_as_room():
    router = holding(Router(), w0=60)
    assert choose(router, [view("w0", free_pages=10), view("w1", running=1)]).worker == "w0"


def test_nobody_able_is_a_retryable_error():
    small = view("w0", n_pages=10, free_pages=10)
    with pytest.raises(CapacityError) as e:
        choose(Router(), [small, view("w1", draining=True)])
    assert e.value.status == 503 and e.value.retryable
    with pytest.raises(CapacityError):
        choose(Router(), [])


# -- prefill and decode apart -------------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_by_a_prefill_worker_and_handed_over():
    route = choose(Router(), [prefiller("p0"), decoder("d0", running=4), decoder("d1", running=2)])
    assert (route.worker, route.decode) == ("p0", "d1")


def test_an_idle_decode_worker_leaves_a_long_prompt_to_an_idle_prefill_worker():
    route = choose(Router(), [prefiller("p0"), decoder("d0")])
    assert (route.worker, route.decode) == ("p0", "d0")


def test_a_short_prompt_stays_on_the_decode_worker():
    route = choose(Router(), [prefiller("p0"), decoder("d0", running=8)], request(n_pages=7))
    assert (route.worker, route.decode) == ("d0", None)
    assert route.why["decode"] == "only 113 tokens are left to compute"


def test_a_prompt_cached_on_the_decode_worker_stays_there():
    route = choose(
        holding(Router(), d0=60), [prefiller("p0"), decoder("d0", running=8), decoder("d1", running=8)]
    )
    assert (route.worker, route.decode) == ("d0", None)


def test_a_short_answer_to_a_long_prompt_is_written_where_the_prompt_was_computed():
    workers = [prefiller("p0"), decoder("d0", running=2)]
    slow = RouterConfig(page_move_s=0.005)  # 0.3 s for the pages; a step takes 0.02
    assert choose(Router(slow), workers, request(n_answer=4)).decode is None
    assert choose(Router(slow), workers, request(n_answer=4)).worker == "p0"
    assert choose(Router(slow), workers, request(n_answer=9)).decode == "d0", "not short"
    assert choose(Router(slow), workers, request(n_answer=None)).decode == "d0", "nobody knows"
    assert choose(Router(), workers, request(n_answer=4)).decode == "d0", "moving takes less"


def test_with_a_target_an_answer_too_short_to_make_up_for_a_move_stays_where_its_prompt_was_computed():
    workers = [prefiller("p0"), decoder("d0", running=2)]
    router = Router(RouterConfig(move_s=0.02, page_move_s=0.0002, target_step_s=0.1))
    # 33 ms for the pages; of each step after the first token about 12 ms are to spare
    assert choose(router, workers, request(n_answer=1)).decode is None
    assert choose(router, workers, request(n_answer=3)).decode is None
    assert choose(router, workers, request(n_answer=4)).decode == "d0"
    assert choose(router, workers, request(n_answer=None)).decode == "d0"


def test_no_prompt_waits_for_prefill_workers_while_a_decode_worker_is_idle():
    busy = [prefiller("p0", queued_prompt_tokens=9000), prefiller("p1", queued_prompt_tokens=8000)]
    route = choose(Router(), [*busy, decoder("d0", running=8), decoder("d1")])
    assert (route.worker, route.decode) == ("d1", None)
    free = [prefiller("p0", queued_prompt_tokens=9000), prefiller("p1")]
    route = choose(Router(), [*free, decoder("d0", running=8), decoder("d1")])
    assert (route.worker, route.decode) == ("p1", "d1")


def test_without_decode_workers_prefill_workers_go_on_and_the_other_way_round():
    assert choose(Router(), [prefiller("p0")]).decode is None
    assert choose(Router(), [decoder("d0", running=5)]).worker == "d0"


def test_a_lower_prefill_share_gets_fewer_prompts():
    mixed = view("m", prefill_weight=0.5, decode_weight=0.5)
    given_out = Counter()
    queues = {"p": 0, "m": 0}
    for i in range(60):
        workers = [
            prefiller("p", queued_prompt_tokens=queues["p"]),
            view("m", prefill_weight=0.5, decode_weight=0.5, queued_prompt_tokens=queues["m"]),
            decoder("d", running=2),
        ]
        w = choose(Router(), workers, request(f"ses-{i}")).worker
        given_out[w] += 1
        queues[w] += 1025
    assert mixed.prefill_weight == 0.5
    assert given_out["p"] > 1.5 * given_out["m"] > 0


def test_a_mixed_worker_gives_its_sessions_to_decode_workers_when_it_is_crowded():
    mixed = {"prefill_weight": 0.5, "decode_weight": 0.5}
    route = choose(Router(), [view("m", running=20, **mixed), decoder("d", running=2)])
    assert (route.worker, route.decode) == ("m", "d")
    route = choose(Router(), [view("m", **mixed), decoder("d", running=20)])
    assert (route.worker, route.decode) == ("m", None)


def test_workers_that_do_both_never_hand_over():
    for loads in ([0, 30, 30, 30], [30, 0, 9, 2]):
        workers = [view(f"w{i}", running=n, queued_prompt_tokens=100 * n) for i, n in enumerate(loads)]
        assert choose(Router(), workers).decode is None


def test_of_many_workers_the_best_pair_is_found():
    workers = [prefiller(f"p{i}", queued_prompt_tokens=5000 + i) for i in range(40)]
    workers += [decoder(f"d{i}", running=50 + i) for i in range(40)]
    workers += [prefiller("p", queued_prompt_tokens=10), decoder("d", running=1)]
    route = choose(Router(), workers)
    assert (route.worker, route.decode) == ("p", "d")
    assert len(route.why["options"]) == 8


def test_the_decode_worker_with_part_of_the_prefix_needs_fewer_pages_moved():
    router = holding(Router(RouterConfig(local_prompt_tokens=0)), d1=50)
    route = choose(router, [prefiller("p0"), decoder("d0", running=4), decoder("d1", running=4)])
    assert route.decode == "d1"


# -- explanations -------------------------------------------------------------------------------------------------------------------


def test_a_miss_says_whether_the_page_was_evicted_or_never_seen():
    router = holding(Router(), w0=10)
    miss = choose(router, BOTH).why["miss"]
    assert miss == {"first_missing_page": 10, "because": "not seen here with this salt", "salted": False}
    router.index.apply("w0", PagesChanged(1, [], list(request().names[5:10])))
    miss = choose(router, BOTH, request(salt="tenant")).why["miss"]
    assert miss == {"first_missing_page": 5, "because": "evicted by w0", "salted": True}


def test_a_full_hit_has_no_miss_to_explain():
    assert choose(holding(Router(), w0=64), BOTH).why["miss"] is None


WORKERS = st.lists(
    st.builds(
        lambda **o: o,
        prefill_weight=st.sampled_from([0.0, 0.5, 1.0]),
        decode_weight=st.sampled_from([0.0, 0.5, 1.0]),
        running=st.integers(0, 30),
        waiting=st.integers(0, 5),
        free_pages=st.integers(0, 200),
        n_pages=st.just(200),
        queued_prompt_tokens=st.integers(0, 20000),
        prefill_tokens_per_s=st.sampled_from([0.0, 500.0, 20000.0]),
        step_s=st.sampled_from([0.0, 0.005, 0.1]),
        draining=st.booleans(),
        seen_s=st.sampled_from([0.0, 100.0]),
        max_running=st.sampled_from([0, 16]),
    ),
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(WORKERS, st.integers(1, 64), st.lists(st.integers(0, 64), max_size=12))
def test_any_fleet_gives_an_able_worker_or_a_retryable_error_and_is_asked_without_a_trace(fleet, n, depths):
    workers = [view(f"w{i}", **options) for i, options in enumerate(fleet)]
    router = holding(Router(), **{f"w{i}": depth for i, depth in enumerate(depths)})
    by_id = {w.worker_id: w for w in workers if not w.draining and w.seen_s == 100.0}
    try:
        route = choose(router, workers, request(n_pages=n), now_s=100.0)
    except CapacityError:
        assert not by_id
        return
    assert route == choose(router, workers, request(n_pages=n), now_s=100.0)
    assert route.worker in by_id and (route.decode is None or route.decode in by_id)
    assert route.decode != route.worker and route.lend_from != route.worker
    if any(w.decode_weight > 0 and w.free_pages >= n + 1 for w in by_id.values()):
        assert by_id[route.decode or route.worker].decode_weight > 0
    json.dumps(route.why)
