"""The matcher of stop strings against the definition: the first to be complete, the longest of those that end together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.text.stops import StopMatcher

pytestmark = pytest.mark.logic
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=5)
TEXT = st.text(alphabet="abc", max_size=30)


def defined(stops: list[str], text: str) -> tuple[int, str] | None:
    """First end of a stop string in ``text``, and the longest one that ends there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def defined_pending(stops: list[str], text: str) -> int:
    """Length of the longest end of ``text`` that a stop string begins with."""
    return max(
        n for n in range(len(text) + 1) if any(stop.startswith(text[len(text) - n :]) for stop in stops)
    )


@given(stops=STOPS, text=TEXT)
def test_first_complete_stop_string_is_found(stops, text):
    assert StopMatcher(stops).feed(text) == defined(stops, text)


@given(stops=STOPS, text=TEXT)
def test_pieces_of_any_size_find_the_same(stops, text):
    matcher = StopMatcher(stops)
    found = next(((n, hit[1]) for n, char in enumerate(text, 1) if (hit := matcher.feed(char))), None)
    assert found == defined(stops, text)


@given(stops=STOPS, text=TEXT)
def test_pending_is_the_longest_possible_start(stops, text):
    matcher = StopMatcher(stops)
    if matcher.feed(text) is None:
        assert matcher.pending == defined_pending(stops, text)


@given(stops=STOPS, early=TEXT, late=TEXT)
def test_unarmed_text_is_let_pass_but_can_begin_a_later_stop(stops, early, late):
    matcher = StopMatcher(stops)
    assert matcher.feed(early, armed=False) is None
    found = matcher.feed(late)
    ends = [n for n in range(1, len(late) + 1) if any((early + late[:n]).endswith(stop) for stop in stops)]
    assert (found[0] if found else None) == (ends[0] if ends else None)
    if found:
        assert (early + late[: found[0]]).endswith(found[1])


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["abcd", "bc"], "abcd", (3, "bc")),
        (["abc", "bc", "c"], "xabc", (4, "abc")),
        (["aab"], "aaab", (4, "aab")),
        (["ab", "ab"], "ab", (2, "ab")),
        (["", "b"], "ab", (2, "b")),
        (["🙂"], "a🙂", (2, "🙂")),
        (["END"], "the end", None),
    ],
)
def test_examples(stops, text, expected):
    assert StopMatcher(stops).feed(text) == expected


def test_no_stop_strings_match_nothing():
    matcher = StopMatcher([])
    assert matcher.feed("anything") is None and matcher.pending == 0


def test_nothing_is_pending_after_text_that_begins_no_stop():
    matcher = StopMatcher(["\n\nUser:"])
    matcher.feed("\n\nUse")
    assert matcher.pending == 5
    matcher.feed("d")
    assert matcher.pending == 0
