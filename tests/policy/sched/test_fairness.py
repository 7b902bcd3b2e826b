"""Whose prompt is computed next."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.policy.sched.fairness import Tenants
from tests.policy.sched.fakes import Rig, shape

pytestmark = pytest.mark.logic


def admitted(rig: Rig) -> list[str]:
    return [a.session_id for p in rig.plans for a in p.admitted]


def one_by_one(**config: object) -> Rig:
    """A rig that runs one session at a time, so that the order of admission shows."""
    return Rig(**{"max_num_seqs": 1, **config})


def test_arrival_orders_the_sessions_of_one_tenant():
    rig = one_by_one()
    for name, arrival_s in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        rig.submit(name, [1], arrival_s=arrival_s)
    rig.run()
    assert admitted(rig) == ["a", "b", "c"]


def test_equal_arrivals_keep_the_order_of_submission():
    rig = one_by_one()
    for name in "cab":
        rig.submit(name, [1])
    rig.run()
    assert admitted(rig) == ["c", "a", "b"]


def test_higher_priority_goes_first_whatever_the_tenant_or_arrival():
    rig = one_by_one()
    rig.submit("first", [1], arrival_s=0.0)
    rig.submit("low", [1], priority=-1, arrival_s=0.0, tenant="idle")
    rig.submit("high", [1], priority=3, arrival_s=9.0)
    rig.run()
    assert admitted(rig) == ["high", "first", "low"]


def test_tenant_that_was_served_less_goes_first():
    rig = one_by_one(prefix_cache=False)
    for i in range(3):
        rig.submit(f"a{i}", range(20), max_tokens=1, tenant="a")
    for i in range(3):
        rig.submit(f"b{i}", range(20), max_tokens=1, tenant="b", arrival_s=1.0)
    rig.run()
    assert admitted(rig) == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_flood_of_one_tenant_does_not_keep_another_waiting():
    rig = one_by_one()
    for i in range(50):
        rig.submit(f"a{i}", [i, 2, 3, 4], max_tokens=2, tenant="a")
    for _ in range(10):
        rig.step()
    rig.submit("b", [1], max_tokens=1, tenant="b", arrival_s=99.0)
    seen = len(admitted(rig))
    rig.run()
    assert admitted(rig).index("b") <= seen + 1


def test_weights_share_the_work():
    rig = one_by_one(tenant_weights={"gold": 3.0})
    for i in range(40):
        rig.submit(f"gold{i}", [50, i], max_tokens=3, tenant="gold")
        rig.submit(f"basic{i}", [60, i], max_tokens=3, tenant="basic")
    while len(admitted(rig)) < 40:
        rig.step()
    n_gold = sum(name.startswith("gold") for name in admitted(rig))
    assert 29 <= n_gold <= 31


def test_long_prompts_of_two_tenants_share_the_steps():
    """Chunks count, not admissions: the second tenant does not wait until the first prompt is done."""
    rig = Rig(max_step_tokens=8)
    rig.submit("a", range(40), tenant="a")
    rig.submit("b", range(50, 90), tenant="b", arrival_s=1.0)
    chunks = [row[0] for _ in range(4) for row in shape(rig.step())]
    assert chunks == ["a", "b", "a", "b"]


def test_prompt_that_is_half_done_goes_before_later_arrivals_of_its_tenant():
    rig = Rig(max_step_tokens=8)
    rig.submit("first", range(20))
    rig.step()
    rig.submit("second", range(50, 70), arrival_s=1.0)
    assert [shape(rig.step()) for _ in range(2)] == [[("first", 8, 8)], [("first", 16, 4), ("second", 0, 4)]]


def test_urgent_prompt_overtakes_a_prompt_that_is_half_done():
    rig = Rig(max_step_tokens=8)
    rig.submit("long", range(40))
    rig.step()
    rig.submit("urgent", range(50, 66), priority=1)
    assert [shape(rig.step())[0][0] for _ in range(2)] == ["urgent", "urgent"]
    rig.run()
    assert len(rig.finish) == 2


def test_prefix_hits_cost_a_tenant_nothing():
    rig = one_by_one()
    rig.submit("warm", range(20), max_tokens=1, tenant="other")
    rig.run()
    rig.submit("a0", range(20), max_tokens=1, tenant="a")  # computes 4 tokens
    rig.submit("b0", range(50, 60), max_tokens=1, tenant="b")  # computes 10
    rig.submit("a1", [7], max_tokens=1, tenant="a", arrival_s=5.0)
    rig.submit("b1", [8], max_tokens=1, tenant="b", arrival_s=4.0)
    rig.run()
    assert admitted(rig) == ["warm", "a0", "b0", "a1", "b1"]


def test_tenant_back_from_idle_starts_at_the_least_active_counter():
    tenants = Tenants({})
    for name, served in (("a", 100.0), ("b", 300.0)):
        tenant = tenants.find(name)
        tenant.n_live, tenant.served = 1, served
    assert tenants.find("new").served == 100.0


def test_tenant_that_pauses_keeps_what_it_owes():
    tenants = Tenants({})
    a = tenants.find("a")
    a.n_live = 1
    heavy = tenants.find("heavy")
    heavy.n_live = 1
    heavy.charge(500)
    heavy.n_live = 0
    assert tenants.find("heavy").served == 500.0
    a.charge(600)
    assert tenants.find("heavy").served == 600.0


def test_debts_end_when_nobody_is_active():
    tenants = Tenants({})
    tenants.find("a").charge(500)
    assert tenants.find("a").served == 0.0


def test_weight_divides_the_charge():
    tenants = Tenants({"gold": 4.0})
    gold, basic = tenants.find("gold"), tenants.find("basic")
    gold.charge(8)
    basic.charge(8)
    assert (gold.served, basic.served) == (2.0, 8.0)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=60))
def test_counters_of_idle_tenants_that_owe_nothing_are_forgotten(visits: list[tuple[int, int]]):
    tenants = Tenants({})
    active = tenants.find("active")
    active.n_live = 1
    for name, tokens in visits:
        tenant = tenants.find(str(name))
        assert tenant.served >= active.served
        tenant.n_live += 1
        tenant.charge(tokens)
        tenant.n_live -= 1
        active.charge(5)
    active.charge(10**6)
    tenants.find("last")
    assert len(tenants) == 2
