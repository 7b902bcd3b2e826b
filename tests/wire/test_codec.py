"""Frames between processes: what is sent arrives equal, and whatever else arrives is a PeerError and nothing worse."""

import itertools
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.base.errors import PeerError
from kilat.wire import PROTOCOL_VERSION, codec, messages
from kilat.wire.codec import decode_from_worker, decode_to_worker, encode
from kilat.wire.kv import Offer
from kilat.wire.messages import (
    Abort,
    Adopt,
    FromWorker,
    Hello,
    Offered,
    Ping,
    SessionEvent,
    StepEvents,
    Submit,
    ToWorker,
)
from kilat.wire.sampling import Grammar, SamplingParams
from kilat.wire.session import SessionRecord
from tests.wire import builds

pytestmark = pytest.mark.logic

UNIONS: tuple[tuple[Any, Callable[[bytes], Any]], ...] = (
    (ToWorker, decode_to_worker),
    (FromWorker, decode_from_worker),
)
RECORD = SessionRecord(
    "ses-1",
    [1, 2, 300_000],
    SamplingParams(
        seed=7, stop=("ab", "c"), logit_bias={5: -1.5}, grammar=Grammar("regex", "a+"), max_tokens=9
    ),
    output_ids=[4],
    page_hashes=[b"0123456789abcdef"],
    arrival_s=1.25,
)
SUBMIT = Submit(RECORD)
NEWS = StepEvents(
    3,
    [
        SessionEvent("ses-1", 0, 0, [7], logprobs=[messages.TokenLogprob(7, -0.5, [(7, -0.5), (8, -2.0)])]),
        SessionEvent("ses-1#1", 1, 4, [], finish="error", error="why", error_code="engine_failed"),
    ],
)
HELLO = Hello("w1", "m", 2048, 64, 49152, 16, 100, [0, 2], "cpu: AVX2", {"weights": 5})
OFFER = Offer("move-1", "w1", 2, [5, 6], 32, 61, 10.0, [b"0123456789abcdef"], [7, 8])
EXAMPLES: list[tuple[Any, Callable[[bytes], Any], Any]] = [
    (SUBMIT, decode_to_worker, ToWorker),
    (NEWS, decode_from_worker, FromWorker),
    (Adopt(RECORD, OFFER), decode_to_worker, ToWorker),
    (Offered("ses-1", OFFER, RECORD), decode_from_worker, FromWorker),
    (HELLO, decode_from_worker, FromWorker),
]
names = pytest.mark.parametrize(
    ("message", "decode", "union"), EXAMPLES, ids=[type(m).__name__ for m, *_ in EXAMPLES]
)


def plain(message: Any) -> dict[str, Any]:
    """A message as the dict that is in its frame."""
    return msgspec.msgpack.decode(encode(message))


def frame(body: Any) -> bytes:
    return msgspec.msgpack.encode(body)


def read_or_refuse(decode: Callable[[bytes], Any], union: Any, data: bytes) -> Any:
    """The message in ``data``, or None for a PeerError; any other outcome fails."""
    try:
        message = decode(data)
    except PeerError as error:
        assert error.retryable and error.status == 503 and error.code == "peer_failed"
        return None
    assert isinstance(message, typing.get_args(union))
    return message


# -- what is sent arrives ---------------------------------------------------------------------------------------------------------


@given(builds.to_worker)
def test_message_to_a_worker_arrives_equal(message: ToWorker) -> None:
    got = decode_to_worker(encode(message))
    assert got == message and type(got) is type(message)


@given(builds.from_worker)
def test_message_from_a_worker_arrives_equal(message: FromWorker) -> None:
    got = decode_from_worker(encode(message))
    assert got == message and type(got) is type(message)


@given(builds.to_worker | builds.from_worker)
def test_same_message_is_the_same_frame(message: ToWorker | FromWorker) -> None:
    decode = decode_to_worker if isinstance(message, typing.get_args(ToWorker)) else decode_from_worker
    assert encode(decode(encode(message))) == encode(message)


def test_every_message_is_tried() -> None:
    assert set(builds.TO_WORKER) == set(typing.get_args(ToWorker))
    assert set(builds.FROM_WORKER) == set(typing.get_args(FromWorker))


def test_tags_are_different_in_each_direction() -> None:
    for union, _ in UNIONS:
        tags = [m.__struct_config__.tag for m in typing.get_args(union)]
        assert len(set(tags)) == len(tags) and None not in tags


def test_hello_says_the_protocol_of_its_sender() -> None:
    assert HELLO.protocol == PROTOCOL_VERSION
    assert decode_from_worker(encode(HELLO)).protocol == PROTOCOL_VERSION


@pytest.mark.parametrize("protocol", [0, PROTOCOL_VERSION + 1, 2**40])
def test_hello_of_another_protocol_can_still_be_read_so_that_it_can_be_named(protocol: int) -> None:
    hello = decode_from_worker(encode(msgspec.structs.replace(HELLO, protocol=protocol)))
    assert isinstance(hello, Hello) and hello.protocol == protocol


def test_one_token_costs_few_bytes() -> None:
    """A busy worker sends thousands of these a second."""
    many = StepEvents(1, [SessionEvent(f"ses-{k:024x}", 0, 5, [49_000]) for k in range(32)])
    assert len(encode(many)) < 32 * 64


def test_default_parameters_cost_nothing() -> None:
    assert plain(Submit(SessionRecord("s", [1], SamplingParams())))["record"]["params"] == {}


# -- what must be refused ---------------------------------------------------------------------------------------------------------


def test_frame_over_the_limit_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    good = encode(SUBMIT)
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", len(good))
    assert decode_to_worker(good) == SUBMIT
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", len(good) - 1)
    with pytest.raises(PeerError, match=f"{len(good)} bytes, limit {len(good) - 1}"):
        decode_to_worker(good)
    with pytest.raises(PeerError, match="limit"):
        decode_from_worker(b"\xc1" * len(good))


@names
def test_frame_cut_at_any_byte_is_refused(message: Any, decode: Callable[[bytes], Any], union: Any) -> None:
    whole = encode(message)
    for n in range(len(whole)):
        with pytest.raises(PeerError, match="could not be read"):
            decode(whole[:n])


@names
def test_frame_with_something_behind_it_is_refused(
    message: Any, decode: Callable[[bytes], Any], union: Any
) -> None:
    for tail in (b"\x00", b"\xc0", encode(message)):
        with pytest.raises(PeerError, match="could not be read"):
            decode(encode(message) + tail)


@names
def test_any_flipped_bit_is_refused_or_gives_another_whole_message(
    message: Any, decode: Callable[[bytes], Any], union: Any
) -> None:
    whole = encode(message)
    refused = 0
    for at, bit in itertools.product(range(len(whole)), range(8)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << bit
        got = read_or_refuse(decode, union, bytes(flipped))
        refused += got is None
        assert got is None or type(got) is type(message)
    assert refused > 0


@given(st.data(), st.sampled_from(EXAMPLES))
@settings(max_examples=300)
def test_any_damage_is_refused_or_gives_a_whole_message(data: st.DataObject, example: Any) -> None:
    message, decode, union = example
    whole = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 5))] = data.draw(st.binary(max_size=5))
        if not whole:
            break
    read_or_refuse(decode, union, bytes(whole))


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_noise_is_refused(data: bytes) -> None:
    for union, decode in UNIONS:
        read_or_refuse(decode, union, data)


@pytest.mark.parametrize("decode", [decode_to_worker, decode_from_worker])
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"type": "hallo"},
        {"type": ""},
        {"type": None},
        {"type": 3},
        {"type": ["submit"]},
        {"session_ids": ["a"]},
        [],
        ["ping"],
        None,
        7,
        "ping",
        b"ping",
        [{"type": "ping"}],
    ],
    ids=repr,
)
def test_frame_that_is_no_message_is_refused(decode: Callable[[bytes], Any], body: Any) -> None:
    with pytest.raises(PeerError, match="could not be read"):
        decode(frame(body))


def test_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(PeerError):
        decode_from_worker(encode(Ping()))
    with pytest.raises(PeerError):
        decode_to_worker(encode(HELLO))


@pytest.mark.parametrize(
    "message", [SUBMIT, Ping(), Abort(["a"]), HELLO, NEWS], ids=lambda m: type(m).__name__
)
def test_unknown_field_is_refused_by_name(message: Any) -> None:
    decode = decode_to_worker if isinstance(message, typing.get_args(ToWorker)) else decode_from_worker
    with pytest.raises(PeerError, match="shoe_size"):
        decode(frame({**plain(message), "shoe_size": 44}))


def test_unknown_field_of_a_nested_struct_is_refused() -> None:
    body = plain(SUBMIT)
    body["record"]["shoe_size"] = 44
    with pytest.raises(PeerError, match="shoe_size"):
        decode_to_worker(frame(body))
    body = plain(SUBMIT)
    body["record"]["params"]["best_of"] = 2
    with pytest.raises(PeerError, match="best_of"):
        decode_to_worker(frame(body))
    body = plain(SUBMIT)
    body["record"]["params"]["grammar"]["strict"] = True
    with pytest.raises(PeerError, match="strict"):
        decode_to_worker(frame(body))


def test_event_with_more_entries_than_it_has_fields_is_refused() -> None:
    body = plain(NEWS)
    body["events"][0].append(1)
    with pytest.raises(PeerError, match="at most length"):
        decode_from_worker(frame(body))
    body = plain(NEWS)
    body["events"][0][6][0].append([])
    with pytest.raises(PeerError, match="at most length"):
        decode_from_worker(frame(body))


@pytest.mark.parametrize("name", ["session_id", "prompt_ids", "params"])
def test_missing_field_is_refused_by_name(name: str) -> None:
    body = plain(SUBMIT)
    del body["record"][name]
    with pytest.raises(PeerError, match=name):
        decode_to_worker(frame(body))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("session_id",), 3),
        (("session_id",), None),
        (("prompt_ids",), "123"),
        (("prompt_ids",), [1.5]),
        (("prompt_ids",), [True]),
        (("output_ids",), None),
        (("page_hashes",), [3]),
        (("params",), []),
        (("params", "temperature"), "hot"),
        (("params", "n"), 1.5),
        (("params", "n"), "2"),
        (("params", "stop"), "ab"),
        (("params", "ignore_eos"), 1),
        (("params", "logit_bias"), {"5": 1.0}),
        (("params", "grammar"), "a+"),
    ],
    ids=lambda x: repr(x)[:30],
)
def test_value_of_another_type_is_refused_with_its_place(path: tuple[str, ...], value: Any) -> None:
    body = plain(SUBMIT)
    at = body["record"]
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    with pytest.raises(PeerError, match=path[-1]):
        decode_to_worker(frame(body))


ANYWHERE: list[bytes] = [
    b"",
    b"\x82\xa4type\xa6events\xa6events",
    b"\x82\xa4type\xa6events\xa6events\x91",
    b"\x82\xa4type\xa6events\xa6events\x91\x9c\xa1a\x00\x00\x90\xc0\xc0\xc0\xc0\x00\xc0\xc0",
    b"\x82\xa4type\xa6events\xa6events\x91\x95\xa1a\x00\x00\x90",
    b"\x82\xa4type\xa6submit\xa6record",
    b"\x82\xa4type\xa6submit\xa4more",
    b"\x82\xa4type\xa6status\xa8counters",
    b"\x82\xa4type\xa5hello\xacledger_bytes",
    b"\x82\xa4type",
]


@pytest.mark.parametrize("prefix", ANYWHERE, ids=repr)
@pytest.mark.parametrize("opening", [b"\x91", b"\x81", b"\x81\xa1a", b"\xdc\x00\x01", b"\xc7\x01\x05"])
def test_deep_nesting_anywhere_is_refused_without_using_up_the_stack(prefix: bytes, opening: bytes) -> None:
    for union, decode in UNIONS:
        assert read_or_refuse(decode, union, prefix + opening * 200_000) is None


@pytest.mark.parametrize("count", [b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff"])
def test_huge_count_in_a_short_frame_is_refused_at_once(count: bytes) -> None:
    """A count is only a promise: memory is taken for what is really there."""
    for prefix in (b"\x82\xa4type\xa6events\xa6events", b"\x82\xa4type\xa5abort\xabsession_ids"):
        for union, decode in UNIONS:
            assert read_or_refuse(decode, union, prefix + count) is None
            assert read_or_refuse(decode, union, prefix + count + b"\xa1a" * 10) is None
    assert read_or_refuse(decode_to_worker, ToWorker, b"\xdf\xff\xff\xff\xff\xa4type") is None
