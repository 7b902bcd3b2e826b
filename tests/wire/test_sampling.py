"""Every limit of sampling parameters: the last value inside passes, the first outside is refused with a message that helps."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.base.errors import LimitError, RequestError
from kilat.wire import sampling
from kilat.wire.sampling import Grammar, SamplingParams, check
from tests.wire import builds

pytestmark = pytest.mark.logic

VOCAB = 1000
BIG = sampling.MAX_COUNT
STOP = "x" * sampling.MAX_STOP_BYTES


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check(SamplingParams(**fields), vocab_size=VOCAB)
    return caught.value


def biases(n: int) -> dict[int, float]:
    return dict.fromkeys(range(n), 0.5)


def test_defaults_pass_and_are_openais() -> None:
    p = SamplingParams()
    check(p, vocab_size=1)
    assert (p.temperature, p.top_p, p.n, p.presence_penalty, p.frequency_penalty) == (1.0, 1.0, 1, 0.0, 0.0)
    assert (p.max_tokens, p.seed, p.stop, p.logprobs, p.logit_bias) == (None, None, (), None, {})


INSIDE: list[tuple[str, Any]] = [
    *(("temperature", x) for x in (0, 0.0, 100, 1e-30, 1e-6)),
    *(("top_p", x) for x in (1e-9, 0.5, 1.0)),
    *(("min_p", x) for x in (0.0, 1.0)),
    *(("repetition_penalty", x) for x in (1e-6, 1.0, 100.0)),
    *(("presence_penalty", x) for x in (-2.0, 2.0)),
    *(("frequency_penalty", x) for x in (-2, 2)),
    *(("top_k", x) for x in (0, 1, BIG)),
    *(("n", x) for x in (1, 16)),
    *(("min_tokens", x) for x in (0, BIG)),
    *(("max_tokens", x) for x in (None, 1, BIG)),
    *(("seed", x) for x in (None, -(2**63), 2**63 - 1)),
    *(("logprobs", x) for x in (None, 0, 20)),
    *(("prompt_logprobs", x) for x in (None, 0, 20)),
    ("stop", (STOP,) * 16),
    ("stop", ("\u20ac" * 85,)),
    ("stop_token_ids", (0, VOCAB - 1)),
    ("stop_token_ids", (7,) * 256),
    ("logit_bias", {0: -100.0, VOCAB - 1: 100.0}),
    ("logit_bias", biases(VOCAB)),
    ("grammar", Grammar("json_object")),
    ("grammar", Grammar("regex", "a" * 2048)),
    *(("grammar", Grammar(kind, "x" * 65536)) for kind in ("json_schema", "choice", "ebnf")),
]


@pytest.mark.parametrize(("name", "value"), INSIDE, ids=lambda x: repr(x)[:24])
def test_value_at_its_limit_passes(name: str, value: Any) -> None:
    params = SamplingParams(**{name: value})
    check(params, vocab_size=VOCAB)
    assert getattr(params, name) == value


# field, refused value, what the message must say of it: what was got, then the limit
OUTSIDE: list[tuple[str, Any, str, str]] = [
    ("temperature", -0.01, "-0.01", "0 to 100"),
    ("temperature", 9e-31, "9e-31", "0 (greedy) or 1e-30 to 100"),
    ("temperature", 5e-324, "5e-324", "0 (greedy) or 1e-30 to 100"),
    ("temperature", 100.5, "100.5", "0 to 100"),
    ("temperature", 10**400, "1000000", "0 to 100"),
    ("top_p", 0.0, "0", "above 0 to 1"),
    ("top_p", -0.1, "-0.1", "0 to 1"),
    ("top_p", 1.0001, "1.0001", "0 to 1"),
    ("min_p", -1e-9, "-1e-09", "0 to 1"),
    ("min_p", 1.5, "1.5", "0 to 1"),
    ("repetition_penalty", 0.0, "0.0", "1e-06 to 100"),
    ("repetition_penalty", 101.0, "101.0", "1e-06 to 100"),
    ("presence_penalty", -2.1, "-2.1", "-2 to 2"),
    ("presence_penalty", 2.1, "2.1", "-2 to 2"),
    ("frequency_penalty", -3, "-3", "-2 to 2"),
    ("frequency_penalty", 3, "3", "-2 to 2"),
    ("top_k", -1, "-1", "0 to 2147483647"),
    ("top_k", BIG + 1, "2147483648", "0 to 2147483647"),
    ("top_k", 10**400, "1000000", "0 to 2147483647"),
    ("n", 0, "0", "1 to 16"),
    ("n", 17, "17", "1 to 16"),
    ("min_tokens", -1, "-1", "0 to 2147483647"),
    ("min_tokens", BIG + 1, "2147483648", "0 to 2147483647"),
    ("max_tokens", 0, "0", "1 to 2147483647"),
    ("max_tokens", -5, "-5", "1 to 2147483647"),
    ("max_tokens", BIG + 1, "2147483648", "1 to 2147483647"),
    ("seed", 2**63, str(2**63), "64-bit"),
    ("seed", -(2**63) - 1, str(-(2**63) - 1), "64-bit"),
    ("logprobs", -1, "-1", "0 to 20"),
    ("logprobs", 21, "21", "0 to 20"),
    ("prompt_logprobs", -1, "-1", "0 to 20"),
    ("prompt_logprobs", 21, "21", "0 to 20"),
    ("stop", ("a",) * 17, "17 stop strings", "16"),
    ("stop", ("a", ""), "0 bytes", "1 to 256"),
    ("stop", (STOP + "x",), "257 bytes", "1 to 256"),
    ("stop", ("\u20ac" * 86,), "258 bytes", "1 to 256"),
    ("stop_token_ids", (1,) * 257, "257 stop token ids", "256"),
    ("stop_token_ids", (3, -1), "-1", "0 to 999"),
    ("stop_token_ids", (VOCAB,), "1000", "0 to 999"),
    ("logit_bias", biases(1025), "1025", "1024"),
    ("logit_bias", {-1: 0.0}, "-1", "0 to 999"),
    ("logit_bias", {VOCAB: 0.0}, "1000", "0 to 999"),
    ("logit_bias", {5: 100.5}, "token id 5 is 100.5", "-100 to 100"),
    ("logit_bias", {5: -101.0}, "token id 5 is -101.0", "-100 to 100"),
    ("grammar", Grammar("regex", "a" * 2049), "2049 bytes", "2048"),
    ("grammar", Grammar("json_schema", "x" * 65537), "65537 bytes", "65536"),
    ("grammar", Grammar("ebnf", "\u20ac" * 30000), "90000 bytes", "65536"),
]


@pytest.mark.parametrize(("name", "value", "got", "limit"), OUTSIDE, ids=lambda x: repr(x)[:24])
def test_value_past_its_limit_is_refused_with_what_was_got_and_the_limit(
    name: str, value: Any, got: str, limit: str
) -> None:
    error = refused(**{name: value})
    assert isinstance(error, LimitError)
    assert error.param == name
    assert (error.status, error.code, error.retryable) == (400, "limit_exceeded", False)
    assert got in error.message and limit in error.message
    assert error.message.index(got) < error.message.rindex(limit)


FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_value_that_is_no_finite_number_is_refused(name: str, value: float) -> None:
    error = refused(**{name: value})
    assert error.param == name and str(value) in error.message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bias_that_is_no_finite_number_is_refused(value: float) -> None:
    error = refused(logit_bias={3: value})
    assert error.param == "logit_bias" and f"token id 3 is {value}" in error.message


def test_min_tokens_above_max_tokens_is_refused_and_equal_passes() -> None:
    check(SamplingParams(min_tokens=4, max_tokens=4), vocab_size=VOCAB)
    error = refused(min_tokens=5, max_tokens=4)
    assert error.param == "min_tokens"
    assert "5" in error.message and "4" in error.message and not isinstance(error, LimitError)


@pytest.mark.parametrize("kind", ["", "JSON_SCHEMA", "lark", "json-schema", "json_object "])
def test_unknown_grammar_kind_is_refused_with_the_known_ones(kind: str) -> None:
    error = refused(grammar=Grammar(kind, ""))
    assert error.param == "grammar" and repr(kind) in error.message
    for known in ("json_schema", "json_object", "regex", "choice", "ebnf"):
        assert known in error.message


def test_zero_top_p_says_how_to_be_greedy() -> None:
    assert "temperature 0" in refused(top_p=0.0).message


def test_limits_of_token_ids_follow_the_vocabulary() -> None:
    params = SamplingParams(stop_token_ids=(9,), logit_bias={9: 1.0})
    check(params, vocab_size=10)
    with pytest.raises(LimitError, match="0 to 8"):
        check(params, vocab_size=9)


def test_every_field_has_a_limit_or_needs_none() -> None:
    """A new field must be checked here or be one that any value of its type is right for."""
    checked = {name for name, *_ in OUTSIDE}
    assert checked | {"include_stop", "ignore_eos"} == set(SamplingParams.__struct_fields__)


def test_parameters_cannot_be_changed_after_the_check() -> None:
    params = SamplingParams()
    with pytest.raises(AttributeError):
        params.n = 99  # type: ignore[misc]


@given(
    params=builds.params,
    inside=st.lists(st.sampled_from([f for f in INSIDE if f[0] != "min_tokens"]), max_size=6),
)
def test_check_either_passes_or_names_the_field_at_fault(
    params: SamplingParams, inside: list[tuple[str, Any]]
) -> None:
    params = msgspec.structs.replace(params, **dict(inside))
    try:
        check(params, vocab_size=VOCAB)
    except RequestError as error:
        assert error.param in SamplingParams.__struct_fields__
        assert error.message and error.status == 400
    else:
        assert 0.0 < params.top_p <= 1.0 and 1 <= params.n <= 16
        assert all(0 <= i < VOCAB for i in (*params.stop_token_ids, *params.logit_bias))


@given(
    st.builds(
        SamplingParams,
        n=st.integers(1, 16),
        max_tokens=st.none() | st.integers(1, BIG),
        stop=st.lists(st.text(min_size=1, max_size=60), max_size=16).map(tuple),
        seed=builds.seeds,
    )
)
def test_parameters_that_pass_can_travel(params: SamplingParams) -> None:
    check(params, vocab_size=VOCAB)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
