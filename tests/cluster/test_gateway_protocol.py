"""Bodies of requests: what is taken, what is ignored, what is refused and how the refusal reads."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.base.errors import KilatError, RequestError
from kilat.cluster.gateway.protocol import (
    IGNORED,
    NEUTRAL,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)

pytestmark = pytest.mark.logic

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: object) -> ChatRequest:
    return parse(msgspec.json.encode({"messages": HELLO, **fields}), ChatRequest)


def test_minimal_chat_request_is_taken() -> None:
    assert chat().messages == HELLO


def test_null_means_not_given_for_every_optional_field() -> None:
    nulls = {name: None for name in ChatRequest.__struct_fields__ if name != "messages"}
    assert chat(**nulls) == chat()


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_field_that_cannot_change_the_answer_is_ignored(name: str) -> None:
    assert chat(**{name: "x"}) == chat()


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_unsupported_field_passes_only_with_the_value_that_means_off(name: str) -> None:
    for value in NEUTRAL[name]:
        assert chat(**{name: value}) == chat()
    with pytest.raises(RequestError) as e:
        chat(**{name: "something else"})
    assert (e.value.param, e.value.code) == (name, "unsupported_field")


def test_unknown_field_is_refused_unless_null() -> None:
    assert chat(frobnicate=None) == chat()
    with pytest.raises(RequestError) as e:
        chat(frobnicate=1)
    assert (e.value.param, e.value.code, e.value.status) == ("frobnicate", "unknown_field", 400)


def test_assistant_message_of_an_answer_can_be_sent_back() -> None:
    answer = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
    }
    assert chat(messages=[*HELLO, answer]).messages[1] == answer


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"n": "2"}, "n"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"logit_bias": {"5": "much"}}, "logit_bias"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [5]}, "messages"),
        ({"tools": {}}, "tools"),
        ({"stream_options": []}, "stream_options"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"priority": 1001}, "priority"),
        ({"structured_outputs": {"xml": "x"}}, "structured_outputs"),
    ],
)
def test_wrong_type_names_the_field(fields: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as e:
        chat(**fields)
    assert e.value.param == param
    assert param in e.value.message


def test_missing_field_is_named() -> None:
    with pytest.raises(RequestError) as e:
        parse(b"{}", CompletionRequest)
    assert (e.value.param, e.value.code) == ("prompt", "missing_field")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b'{"x": 1e999, "prompt": "a"}',
        b'{"prompt": ' + b"[" * 100_000 + b"}",
        b'{"guided_json": ' + b"[" * 5000 + b"]" * 5000 + b', "prompt": "a"}',
        b"\xef\xbb\xbf{}",
    ],
)
def test_broken_body_is_a_request_error(body: bytes) -> None:
    with pytest.raises(RequestError) as e:
        parse(body, CompletionRequest)
    assert 400 <= e.value.status < 500


@given(st.binary(max_size=200))
def test_any_bytes_parse_or_raise_a_request_error(body: bytes) -> None:
    for kind in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest):
        try:
            parse(body, kind)
        except RequestError as e:
            assert e.message


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(ChatRequest.__struct_fields__), _JSON, max_size=5))
def test_any_json_in_known_fields_parses_or_raises_a_kilat_error(fields: dict[str, object]) -> None:
    try:
        chat(**fields)
    except KilatError as e:
        assert 400 <= e.status < 500
