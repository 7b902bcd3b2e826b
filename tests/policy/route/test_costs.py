"""Seconds out of rates."""

from random import Random

import pytest

from kilat.base.errors import ConfigError
from kilat.policy.route.config import RouterConfig
from kilat.policy.route.costs import AIM, UNKNOWN_TOKENS_PER_S, Costs, LinkRate
from kilat.policy.sched.pace import MARGIN
from tests.policy.route.fleet import RATE, decoder, request, view

pytestmark = pytest.mark.logic


def costs(workers, r=None, **config):
    c = RouterConfig(**config)
    return Costs(c, LinkRate(c.move_s, c.page_move_s), r or request(), workers)


def test_a_prompt_costs_its_queue_and_what_is_not_held():
    w = view("w", queued_prompt_tokens=500)
    p = costs([w]).prefill(w, 32, None, 0)
    assert p.n_left == 32 * 16 + 1
    assert p.queue_s == pytest.approx(500 / RATE)
    assert p.compute_s == pytest.approx(p.n_left / RATE)
    assert p.total_s == pytest.approx(p.queue_s + p.compute_s)


def test_a_prompt_held_as_a_whole_still_computes_its_last_token():
    w = view("w")
    assert costs([w]).prefill(w, 64, None, 0).n_left == 1


def test_streams_beside_a_long_prompt_make_it_dearer_but_not_beside_a_short_one():
    idle, busy = view("w"), view("w", running=10)
    c = costs([idle], stall_share=0.1)
    assert c.prefill(busy, 0, None, 0).total_s == pytest.approx(2 * c.prefill(idle, 0, None, 0).total_s)
    assert c.prefill(busy, 60, None, 0).total_s == c.prefill(idle, 60, None, 0).total_s


def test_with_a_target_for_steps_a_prompt_gets_the_time_that_streams_leave():
    idle, busy = view("w", step_s=0.02), view("w", running=10, step_s=0.02, queued_prompt_tokens=100)
    c = costs([idle], target_step_s=0.05)
    assert c.prefill(idle, 0, None, 0).total_s == pytest.approx(1025 / RATE)
    assert c.prefill(busy, 0, None, 0).total_s == pytest.approx(1125 / (RATE * (1 - 0.02 / (AIM * 0.05))))
    assert AIM == MARGIN
    full = view("w", running=99, step_s=0.2)
    assert c.prefill(full, 0, None, 0).compute_s == pytest.approx(20 * 1025 / RATE)


def test_only_pages_that_the_worker_lacks_are_lent():
    w = view("w")
    p = costs([w], move_s=0.0, page_move_s=0.001).prefill(w, 40, "peer", 60)
    assert (p.lend_from, p.n_lent, p.move_s) == ("peer", 60, pytest.approx(0.02))
    assert costs([w]).prefill(w, 60, "peer", 60).lend_from is None
    assert costs([w], move_s=10.0).prefill(w, 40, "peer", 60).lend_from is None


def test_the_margin_decides_between_equal_costs_of_moving_and_computing():
    w = view("w")
    per_page = 16 / RATE
    assert costs([w], move_s=0.0, page_move_s=per_page, move_margin=1.1).prefill(w, 0, "p", 9).n_lent == 0
    assert costs([w], move_s=0.0, page_move_s=per_page, move_margin=0.9).prefill(w, 0, "p", 9).n_lent == 9


def test_an_unknown_rate_is_the_mean_of_the_known_ones():
    new, a, b = view("n", prefill_tokens_per_s=0.0), view("a"), view("b", prefill_tokens_per_s=3 * RATE)
    assert costs([new, a, b]).prefill(new, 0, None, 0).compute_s == pytest.approx(1025 / (2 * RATE))
    assert costs([new]).prefill(new, 0, None, 0).compute_s == pytest.approx(1025 / UNKNOWN_TOKENS_PER_S)


def test_sessions_beyond_the_places_of_a_worker_are_dearer_than_those_within():
    c = costs([view("w")])
    within = c.decode_s(view("w", running=8, max_running=16)) - c.decode_s(
        view("w", running=7, max_running=16)
    )
    over = c.decode_s(view("w", running=16, max_running=16)) - c.decode_s(
        view("w", running=15, max_running=16)
    )
    assert over > 2 * within


def test_half_a_share_costs_twice():
    c = costs([view("w")])
    assert c.decode_s(view("w", decode_weight=0.5)) == pytest.approx(2 * c.decode_s(view("w")))
    whole, half = view("w"), view("w", prefill_weight=0.5)
    assert c.prefill(half, 0, None, 0).total_s == pytest.approx(2 * c.prefill(whole, 0, None, 0).total_s)
    none = decoder("w")
    assert c.prefill(none, 0, None, 0).total_s == c.prefill(whole, 0, None, 0).total_s


def test_handing_over_moves_the_pages_that_are_not_there():
    c = costs([view("w")], move_s=0.5, page_move_s=0.01)
    assert c.hand_over_s(0) == pytest.approx(0.5 + 65 * 0.01)
    assert c.hand_over_s(60) == pytest.approx(0.5 + 5 * 0.01)


def test_measured_moves_replace_the_guess():
    link = LinkRate(0.01, 0.001)
    assert link.seconds(0) == 0.0
    for _ in range(60):
        link.measured(100, 0.01 + 100 * 0.02)
    assert link.seconds(10) == pytest.approx(0.01 + 10 * 0.02, rel=0.01)
    before = link.page_move_s
    link.measured(0, 1.0)
    link.measured(5, 0.0)
    assert link.page_move_s == before


def test_moves_of_few_pages_that_wait_for_steps_do_not_make_pages_dear():
    link, rng = LinkRate(0.001, 0.001), Random(0)
    for _ in range(300):
        n = rng.choice((1, 2, 32, 32))
        link.measured(n, rng.uniform(0.02, 0.06) + n * 0.0008)
    assert link.move_s == pytest.approx(0.04, rel=0.3)
    assert link.page_move_s == pytest.approx(0.0008, rel=0.5)


def test_a_link_that_becomes_slower_is_noticed():
    link = LinkRate(0.001, 0.001)
    for page_s in (0.0005, 0.005):
        for n in (1, 8, 32, 64) * 50:
            link.measured(n, 0.01 + n * page_s)
        assert link.seconds(50) == pytest.approx(0.01 + 50 * page_s, rel=0.05)


def test_what_is_measured_of_moves_is_never_below_nothing():
    link = LinkRate(0.01, 0.001)
    for n, seconds in [(1, 1.0), (50, 0.1), (100, 0.01)] * 20:
        link.measured(n, seconds)
    assert link.page_move_s == 0.0 and 0.01 < link.move_s < 1.0
    steep = LinkRate(0.01, 0.001)
    for n, seconds in [(1, 0.001), (100, 10.0)] * 20:
        steep.measured(n, seconds)
    assert steep.move_s == 0.0 and 0.0 < steep.page_move_s < 0.1


@pytest.mark.parametrize(
    "wrong",
    [
        {"dead_after_s": 0.0},
        {"move_margin": 0.0},
        {"stall_share": -1.0},
        {"page_move_s": float("nan")},
        {"target_step_s": 0.0},
    ],
)
def test_settings_without_sense_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RouterConfig(**wrong)
