"""Virtual time: order and ends."""

import pytest

from kilat.base.errors import EngineError
from kilat.sim.agenda import Agenda

pytestmark = pytest.mark.logic


def test_calls_come_in_order_of_time_and_equal_times_in_order_of_asking():
    agenda, seen = Agenda(), []
    for name, delay_s in (("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0)):
        agenda.after(delay_s, lambda name=name: seen.append((agenda.now_s, name)))
    agenda.run(10.0)
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c"), (2.0, "d")]
    assert agenda.now_s == 10.0


def test_a_call_may_ask_for_others_and_later_ones_wait():
    agenda, seen = Agenda(), []
    agenda.after(1.0, lambda: agenda.after(0.5, lambda: seen.append(agenda.now_s)))
    agenda.after(3.0, lambda: seen.append(agenda.now_s))
    agenda.run(2.0)
    assert seen == [1.5]
    agenda.run(3.0)
    assert seen == [1.5, 3.0]


def test_the_past_is_now():
    agenda, seen = Agenda(), []
    agenda.run(5.0)
    agenda.after(-1.0, lambda: seen.append(agenda.now_s))
    agenda.run(5.0)
    assert seen == [5.0]


def test_going_round_in_circles_is_an_error():
    agenda = Agenda()

    def again() -> None:
        agenda.after(0.0, again)

    again()
    with pytest.raises(EngineError, match="no end in sight"):
        agenda.run(1.0, max_calls=100)
