"""The scanner of one call object: when a call has started, where it ends, and what it gives back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.text.calls import CallScanner

pytestmark = pytest.mark.logic
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=5), JSON, max_size=4)


def scan(text: str, *, needs_arguments: bool = False, step: int = 1) -> tuple[CallScanner, str, str]:
    """The scanner after ``text`` in pieces of ``step``, the arguments, and what it did not consume."""
    scanner, arguments = CallScanner(needs_arguments=needs_arguments), ""
    for at in range(0, len(text), step):
        piece = text[at : at + step]
        end = scanner.feed(piece, 0)
        arguments += scanner.take()
        if scanner.ended:
            return scanner, arguments, text[at + end :]
    return scanner, arguments, ""


@given(
    name=st.text(min_size=1, max_size=10),
    arguments=OBJECTS,
    extra=st.dictionaries(
        st.text(max_size=5).filter(lambda k: k not in ("name", "arguments", "parameters")), JSON, max_size=3
    ),
    order=st.randoms(use_true_random=False),
    key=st.sampled_from(["arguments", "parameters"]),
    indent=st.sampled_from([None, 0, 2]),
    ascii_only=st.booleans(),
    step=st.integers(1, 50),
)
def test_every_json_object_with_name_and_arguments_is_a_call(
    name, arguments, extra, order, key, indent, ascii_only, step
):
    # a < in a key or a string is text; outside of them JSON has none
    items = [("name", name), (key, arguments), *extra.items()]
    order.shuffle(items)
    text = json.dumps(dict(items), indent=indent, ensure_ascii=ascii_only)
    scanner, got, rest = scan(text + "tail", needs_arguments=True, step=step)
    assert (scanner.started, scanner.ended, scanner.name, rest) == (True, True, name, "tail")
    assert json.loads(got) == arguments
    assert got in text
    assert scanner.raw == ""


@given(value=JSON.filter(lambda value: not isinstance(value, dict)), step=st.integers(1, 9))
def test_other_json_is_no_call_and_is_given_back(value, step):
    text = json.dumps(value)
    scanner, got, rest = scan(text, step=step)
    assert (scanner.started, got) == (False, "")
    assert scanner.raw + rest == text


@given(arguments=OBJECTS, cut=st.integers(0, 400))
def test_arguments_so_far_are_a_start_of_all_arguments(arguments, cut):
    text = '{"name": "f", "arguments": ' + json.dumps(arguments) + "}"
    _, whole, _ = scan(text)
    scanner, some, _ = scan(text[:cut])
    assert whole.startswith(some)
    assert scanner.started == bool(some)


@given(text=st.text(alphabet='{}[]":,\\ <na1', max_size=30), step=st.integers(1, 5))
def test_any_text_is_consumed_given_back_or_left(text, step):
    scanner, got, rest = scan(text, step=step)
    if not scanner.started:
        assert scanner.raw + rest == text and got == ""


def test_arguments_wait_for_the_name():
    scanner = CallScanner(needs_arguments=True)
    scanner.feed('{"arguments": {"a": 1}, ', 0)
    assert (scanner.started, scanner.take()) == (False, "")
    scanner.feed('"name": "f"', 0)
    assert (scanner.started, scanner.name, scanner.take(), scanner.ended) == (True, "f", '{"a": 1}', False)
    scanner.feed("}", 0)
    assert scanner.ended and scanner.take() == ""


def test_start_hands_out_the_brace():
    scanner = CallScanner(needs_arguments=True)
    scanner.feed('{"name": "f", "arguments": ', 0)
    assert not scanner.started
    scanner.feed("{", 0)
    assert scanner.started and scanner.take() == "{"


def test_first_of_two_arguments_counts():
    scanner, got, _ = scan('{"parameters": {"a": 1}, "arguments": {"b": 2}, "name": "f"}')
    assert (scanner.name, got) == ("f", '{"a": 1}')


def test_later_keys_do_not_change_a_started_call():
    scanner, got, _ = scan('{"name": "f", "arguments": {}, "name": "g", "arguments": {"x": 1}}')
    assert (scanner.name, got, scanner.raw) == ("f", "{}", "")


@pytest.mark.parametrize("needs", [True, False])
def test_call_without_arguments_depends_on_the_format(needs):
    scanner, got, _ = scan('{"name": "f"}', needs_arguments=needs)
    assert (scanner.started, got) == ((False, "") if needs else (True, "{}"))


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("x", "x"),
        ("  [", "["),
        ("{x", "x"),
        ("{,", ","),
        ('{"name" "f"}', '"f"}'),
        ('{"name": }', "}"),
        ('{"name": "f",}', "}"),
        ('{"name": "f" "a"', '"a"'),
        ('{"x": <', "<"),
        ('{"x": {"y": <', "<"),
        ('{"name": "a\nb", ', ", "),
        ('{"name": tru, ', ", "),
    ],
)
def test_first_character_that_does_not_fit_ends_it(text, rest):
    scanner, _, left = scan(text)
    assert (scanner.started, scanner.ended, left) == (False, True, rest)
    assert scanner.raw + left == text


def test_what_follows_broken_arguments_is_given_back():
    scanner, got, rest = scan('{"name": "f", "arguments": {"a": 1}, "k" oops')
    assert (scanner.started, got, scanner.raw, rest) == (True, '{"a": 1}', ', "k" ', "oops")


def test_backslashes_do_not_end_strings():
    arguments = r'{"a": "\\\" } \\", "b": "\\"}'
    _, got, _ = scan('{"name": "f", "arguments": ' + arguments + "}")
    assert got == arguments
