"""Deltas joined and assembled."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.text.deltas import Content, Message, Reasoning, ToolArguments, ToolCall, ToolStart, assemble, join

pytestmark = pytest.mark.logic
TEXTS = st.text(min_size=1, max_size=3)


@st.composite
def streams(draw):
    """Deltas as a parser could give them: the arguments of a call come after its start."""
    deltas, n_calls = [], 0
    for kind in draw(st.lists(st.sampled_from("crsa"), max_size=20)):
        if kind == "c":
            deltas.append(Content(draw(TEXTS)))
        elif kind == "r":
            deltas.append(Reasoning(draw(TEXTS)))
        elif kind == "s":
            deltas.append(ToolStart(n_calls, f"id{n_calls}", draw(TEXTS)))
            n_calls += 1
        elif n_calls:
            deltas.append(ToolArguments(draw(st.integers(0, n_calls - 1)), draw(TEXTS)))
    return deltas


@given(deltas=streams())
def test_joining_changes_no_message(deltas):
    assert assemble(join(deltas)) == assemble(deltas)


@given(deltas=streams())
def test_no_two_neighbours_are_left_to_join(deltas):
    joined = list(join(deltas))
    for one, two in pairwise(joined):
        same = type(one) is type(two) and getattr(one, "index", 0) == getattr(two, "index", 0)
        assert not same or isinstance(one, ToolStart)


def test_message_has_all_parts():
    deltas = [
        Reasoning("a"),
        Reasoning("b"),
        Content("c"),
        ToolStart(0, "i", "f"),
        ToolArguments(0, "{"),
        ToolStart(1, "j", "g"),
        ToolArguments(0, "}"),
        ToolArguments(1, "{}"),
        Content("d"),
    ]
    assert assemble(deltas) == Message("cd", "ab", (ToolCall("i", "f", "{}"), ToolCall("j", "g", "{}")))


@pytest.mark.parametrize(
    ("deltas", "content"),
    [([], ""), ([ToolStart(0, "i", "f")], None), ([Reasoning("x")], ""), ([Content("")], "")],
)
def test_content_is_none_only_beside_calls(deltas, content):
    assert assemble(deltas).content == content


def test_no_reasoning_is_none():
    assert assemble([Content("x")]).reasoning is None
