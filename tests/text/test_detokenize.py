"""Streaming text equals decoding at once, however the ids arrive; stop strings cut it at one place."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.text.detokenize import StreamDetokenizer
from kilat.text.tokenizer import Tokenizer
from tests.text.tiny import byte_level_tokenizer, sentencepiece_tokenizer

pytestmark = pytest.mark.logic


@cache
def tokenizers() -> tuple[Tokenizer, Tokenizer]:
    return byte_level_tokenizer(), sentencepiece_tokenizer()


TOKENIZER = st.sampled_from([0, 1])
IDS = st.lists(st.integers(0, 330), max_size=40)
TEXT = st.text(alphabet="helo wrd.S TOP\né🙂日", max_size=30)
SPLITS = st.lists(st.integers(1, 5), max_size=60)


def split(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """``ids`` in pieces of these sizes, the rest one by one."""
    pieces, at = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        if at >= len(ids):
            break
        pieces.append(ids[at : at + size])
        at += size
    return pieces


def stream(
    tokenizer: Tokenizer, pieces: list[list[int]], **options: object
) -> tuple[list[str], StreamDetokenizer]:
    """What every push and then finish gave."""
    detokenizer = StreamDetokenizer(tokenizer, **options)
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()], detokenizer


@given(which=TOKENIZER, ids=IDS, sizes=SPLITS, skip=st.booleans(), continues=st.booleans())
def test_any_split_gives_the_text_of_all_ids(which, ids, sizes, skip, continues):
    tokenizer = tokenizers()[which]
    texts, detokenizer = stream(tokenizer, split(ids, sizes), skip_special=skip, continues=continues)
    assert "".join(texts) == tokenizer.decode(ids, skip_special=skip, continues=continues)
    assert detokenizer.n_tokens == detokenizer.n_sent_tokens == len(ids)
    assert detokenizer.stopped is None


@given(which=TOKENIZER, text=TEXT)
def test_streamed_text_is_the_text_that_was_encoded(which, text):
    tokenizer = tokenizers()[which]
    ids = tokenizer.encode(text, add_special=False)
    texts, _ = stream(tokenizer, [[i] for i in ids])
    assert "".join(texts) == text
    assert all("\ufffd" not in piece for piece in texts)


@given(which=TOKENIZER, ids=IDS, sizes=SPLITS)
def test_sent_text_is_never_taken_back(which, ids, sizes):
    """What was sent after any number of ids is how the text goes on with every later id."""
    tokenizer = tokenizers()[which]
    texts, _ = stream(tokenizer, split(ids, sizes))
    sent = ""
    for piece in texts:
        sent += piece
        assert tokenizer.decode(ids).startswith(sent)


def cut_by_definition(text: str, stops: list[str], after: int, include: bool) -> tuple[str, str | None]:
    """``text`` up to the first complete stop string that ends behind the first ``after`` characters."""
    for end in range(after + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


STOPS = st.lists(st.text(alphabet="helo w🙂S", min_size=1, max_size=4), min_size=1, max_size=4)


@given(which=TOKENIZER, text=TEXT, stops=STOPS, sizes=SPLITS, include=st.booleans())
def test_any_split_stops_at_the_same_place(which, text, stops, sizes, include):
    tokenizer = tokenizers()[which]
    ids = tokenizer.encode(text, add_special=False)
    expected, stop = cut_by_definition(text, stops, 0, include)
    texts, detokenizer = stream(tokenizer, split(ids, sizes), stop=stops, include_stop=include)
    assert ("".join(texts), detokenizer.stopped) == (expected, stop)


@given(which=TOKENIZER, text=TEXT, stops=STOPS, sizes=SPLITS, least=st.integers(0, 12))
def test_stop_strings_within_min_tokens_are_let_pass(which, text, stops, sizes, least):
    tokenizer = tokenizers()[which]
    ids = tokenizer.encode(text, add_special=False)
    # characters that are whole after the first ``least`` ids
    early = b"".join(tokenizer.token_bytes(i) for i in ids[:least]).decode("utf-8", "ignore")
    early = early.removeprefix(" ") if tokenizer.strip_space else early
    expected, stop = cut_by_definition(text, stops, len(early), False)
    texts, detokenizer = stream(tokenizer, split(ids, sizes), stop=stops, min_tokens=least)
    assert ("".join(texts), detokenizer.stopped) == (expected, stop)


@pytest.mark.parametrize(
    ("least", "stop", "expected"),
    [(0, "hello", ""), (1, "hello", "hello"), (2, "hellohello", "hello"), (3, "hello", "hello" * 3)],
)
def test_stop_that_the_last_of_min_tokens_completes_is_let_pass(least, stop, expected):
    tokenizer = tokenizers()[0]
    ids = tokenizer.encode("hello" * 3, add_special=False)
    assert len(ids) == 3
    texts, _ = stream(tokenizer, [ids], stop=[stop], min_tokens=least)
    assert "".join(texts) == expected


@given(which=TOKENIZER, text=TEXT, stops=STOPS, sizes=SPLITS)
def test_tokens_count_up_to_the_one_that_completed_the_stop(which, text, stops, sizes):
    tokenizer = tokenizers()[which]
    ids = tokenizer.encode(text, add_special=False)
    _, detokenizer = stream(tokenizer, split(ids, sizes), stop=stops)
    if detokenizer.stopped is None:
        assert detokenizer.n_tokens == len(ids)
        return
    kept = detokenizer.n_tokens
    assert detokenizer.stopped in tokenizer.decode(ids[:kept])
    assert all(stop not in tokenizer.decode(ids[: kept - 1]) for stop in stops)


@given(which=TOKENIZER, text=TEXT, stops=STOPS, sizes=SPLITS)
def test_text_never_waits_longer_than_a_stop_string(which, text, stops, sizes):
    tokenizer = tokenizers()[which]
    ids = tokenizer.encode(text, add_special=False)
    detokenizer, sent, seen = StreamDetokenizer(tokenizer, stop=stops), "", []
    for piece in split(ids, sizes):
        sent += detokenizer.push(piece)
        seen += piece
        if detokenizer.stopped is not None:
            break
        whole = b"".join(tokenizer.token_bytes(i) for i in seen).decode("utf-8", "ignore")
        whole = whole.removeprefix(" ") if tokenizer.strip_space else whole
        held = whole.removeprefix(sent)
        assert whole.startswith(sent)
        assert not held or any(stop.startswith(held) for stop in stops)


@given(which=TOKENIZER, ids=IDS, sizes=SPLITS)
def test_offsets_say_where_the_text_of_each_id_begins(which, ids, sizes):
    tokenizer = tokenizers()[which]
    texts, detokenizer = stream(tokenizer, split(ids, sizes))
    offsets = list(detokenizer.text_offsets)
    assert len(offsets) == len(ids)
    assert offsets == sorted(offsets)
    assert offsets[:1] in ([], [0])
    assert all(offset <= len("".join(texts)) for offset in offsets)


def test_offsets_of_plain_tokens_are_the_lengths_before_them():
    tokenizer = tokenizers()[0]
    ids = tokenizer.encode("hello world", add_special=False)
    _, detokenizer = stream(tokenizer, [ids])
    begin, expected = 0, []
    for i in ids:
        expected.append(begin)
        begin += len(tokenizer.token_str(i))
    assert list(detokenizer.text_offsets) == expected


def test_offsets_inside_a_character_are_where_the_character_begins():
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode("a€b", add_special=False)
    _, detokenizer = stream(tokenizer, [[i] for i in ids])
    assert list(detokenizer.text_offsets) == [0, 1, 1, 1, 2]


def test_character_is_held_until_its_last_byte():
    tokenizer = tokenizers()[0]
    ids = tokenizer.encode("é", add_special=False)
    texts, _ = stream(tokenizer, [[i] for i in ids])
    assert texts == ["", "é", ""]


def test_unfinished_character_comes_out_at_the_end():
    tokenizer = tokenizers()[0]
    ids = tokenizer.encode("x🙂", add_special=False)[:-1]
    texts, detokenizer = stream(tokenizer, [ids])
    assert texts == ["x", "\ufffd"]
    assert detokenizer.n_sent_tokens == len(ids)


def test_special_tokens_are_skipped_between_the_bytes_of_a_character():
    tokenizer = tokenizers()[0]
    first, second = tokenizer.encode("é", add_special=False)
    texts, detokenizer = stream(tokenizer, [[first], [0], [second]])
    assert texts == ["", "", "é", ""]
    assert detokenizer.n_tokens == 3


def test_special_tokens_are_shown_on_request():
    tokenizer = tokenizers()[0]
    texts, _ = stream(tokenizer, [[0], tokenizer.encode("x", add_special=False)], skip_special=False)
    assert texts == ["<|end|>", "x", ""]


def test_ids_above_the_vocabulary_give_no_text():
    tokenizer = tokenizers()[0]
    texts, detokenizer = stream(tokenizer, [[tokenizer.vocab_size], [10**9]])
    assert texts == ["", "", ""] and detokenizer.n_tokens == 2


def test_sentencepiece_space_is_dropped_only_at_the_start():
    tokenizer = tokenizers()[1]
    ids = tokenizer.encode("hello hello", add_special=False)
    assert stream(tokenizer, [[i] for i in ids])[0] == ["hello", " hello", ""]
    assert stream(tokenizer, [[i] for i in ids], continues=True)[0] == [" hello", " hello", ""]


def test_only_one_space_is_dropped_and_it_may_be_a_token_of_its_own():
    tokenizer = tokenizers()[1]
    ids = tokenizer.encode("  w", add_special=False)
    texts, _ = stream(tokenizer, [[i] for i in ids])
    assert "".join(texts) == "  w"


def test_held_start_of_a_stop_comes_out_when_it_is_none():
    tokenizer = tokenizers()[0]
    pieces = [tokenizer.encode(text, add_special=False) for text in ("a", "S", "T", "x")]
    texts, detokenizer = stream(tokenizer, pieces, stop=["STOP"])
    assert texts == ["a", "", "", "STx", ""]
    assert detokenizer.stopped is None


def test_held_start_of_a_stop_comes_out_at_the_end():
    tokenizer = tokenizers()[0]
    texts, detokenizer = stream(tokenizer, [tokenizer.encode("aSTO", add_special=False)], stop=["STOP"])
    assert texts == ["a", "STO"]
    assert detokenizer.n_sent_tokens == detokenizer.n_tokens


def test_ids_after_the_stop_are_not_taken():
    tokenizer = tokenizers()[0]
    ids = tokenizer.encode("aSTOPbb", add_special=False)
    texts, detokenizer = stream(tokenizer, [ids, ids], stop=["STOP"])
    assert texts == ["a", "", ""]
    assert detokenizer.n_tokens == 2
    assert detokenizer.n_sent_tokens == 1
    assert len(detokenizer.text_offsets) == 2


def test_stop_inside_a_token_keeps_the_token():
    tokenizer = tokenizers()[0]
    ids = tokenizer.encode("hello", add_special=False)
    texts, detokenizer = stream(tokenizer, [ids], stop=["ll"])
    assert (texts, detokenizer.n_tokens, detokenizer.n_sent_tokens) == (["he", ""], 1, 1)


def test_sent_tokens_follow_the_text_that_was_sent():
    tokenizer = tokenizers()[0]
    detokenizer = StreamDetokenizer(tokenizer, stop=["STOP"])
    counts = []
    for text in ("a", "S", "T", "x", "S"):
        detokenizer.push(tokenizer.encode(text, add_special=False))
        counts.append(detokenizer.n_sent_tokens)
    assert counts == [1, 1, 1, 4, 4]
    detokenizer.finish()
    assert detokenizer.n_sent_tokens == 5


def test_finish_again_gives_nothing():
    tokenizer = tokenizers()[0]
    _, detokenizer = stream(tokenizer, [tokenizer.encode("ST", add_special=False)], stop=["STOP"])
    assert detokenizer.finish() == ""


def test_replacement_character_at_the_end_can_complete_a_stop():
    tokenizer = tokenizers()[0]
    ids = tokenizer.encode("xé", add_special=False)[:-1]
    texts, detokenizer = stream(tokenizer, [ids], stop=["\ufffd"])
    assert ("".join(texts), detokenizer.stopped) == ("x", "\ufffd")
