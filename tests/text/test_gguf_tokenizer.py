"""Tokenizers rebuilt from GGUF metadata: the right cuts, the right merges, and no guess about what is not known."""

import unicodedata
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.base.errors import ModelFileError
from kilat.text.gguf_tokenizer import CUTS, build
from kilat.text.spelling import Spelling
from kilat.text.tokenizer import Tokenizer
from tests.base.gguf_bytes import BOOL, F32, I32, STRING, U32, GgufBytes, array, scalar
from tests.text.tiny import (
    BYTE,
    CONTROL,
    LETTERS,
    NORMAL,
    PIECES,
    UNUSED,
    USER,
    Files,
    byte_level,
    byte_level_tokenizer,
    sentencepiece,
    sentencepiece_tokenizer,
)

pytestmark = pytest.mark.logic
TEXT = st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=40) | st.text(
    alphabet=" \n\tab'sLl12.,é日🙂<|>", max_size=40
)


def cuts(pre: str, text: str) -> list[str]:
    """The pieces that a vocabulary with this ``pre`` cuts ``text`` into."""
    pieces = build(byte_level(pre)).pipeline.pre_tokenizer.pre_tokenize_str(text)
    return [Spelling(byte_level=True).bytes_of(piece).decode() for piece, _ in pieces]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "I'll go", ["I", "'ll", " go"]),
        ("gpt-2", "I'LL go", ["I", "'", "LL", " go"]),
        ("gpt-2", "in 2024!", ["in", " 2024", "!"]),
        ("gpt-2", "a   b", ["a", "  ", " b"]),
        ("gpt-2", "x\n\n y", ["x", "\n\n", " y"]),
        ("smollm", "in 2024!", ["in", " ", "2", "0", "2", "4", "!"]),
        ("smollm", "a   7", ["a", "   ", "7"]),
        ("smollm", "I'LL", ["I", "'", "LL"]),
        ("qwen2", "in 2024!", ["in", " ", "2", "0", "2", "4", "!"]),
        ("qwen2", "I'LL go", ["I", "'LL", " go"]),
        ("qwen2", "(foo)bar", ["(foo", ")bar"]),
        ("qwen2", "a;\n\nb", ["a", ";\n\n", "b"]),
        ("qwen2", "\tx  \n y", ["\tx", "  \n", " y"]),
        ("llama-bpe", "in 12345!", ["in", " ", "123", "45", "!"]),
        ("llama-bpe", "I'LL go", ["I", "'LL", " go"]),
        ("llama-bpe", "a;\n\nb", ["a", ";\n\n", "b"]),
        ("tekken", "HelloWorld 42", ["Hello", "World", " ", "4", "2"]),
        ("tekken", "HTTPServer", ["HTTPServer"]),
        ("tekken", "I'll", ["I", "'ll"]),
        ("tekken", "a//\nb", ["a", "//\n", "b"]),
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
        ("default", "x (y)", ["x", " ", "(", "y", ")"]),
    ],
)
def test_pre_cuts_text_as_its_model_was_trained(pre, text, expected):
    assert cuts(pre, text) == expected


@pytest.mark.parametrize("name", ["llama3", "llama-v3"])
def test_other_names_of_llama3_cut_alike(name):
    assert CUTS[name] == CUTS["llama-bpe"]


@pytest.mark.parametrize("pre", CUTS)
@given(text=TEXT)
def test_cuts_lose_nothing(pre, text):
    tokenizer = shared(pre)
    if CUTS[pre].nfc:
        return
    assert tokenizer.decode(tokenizer.encode(text, add_special=False), skip_special=False) == text


@cache
def shared(pre: str) -> Tokenizer:
    return byte_level_tokenizer(pre)


@given(text=TEXT)
def test_qwen2_encodes_the_composed_form_of_text(text):
    tokenizer = shared("qwen2")
    # added tokens are matched in the text as it is, before it is composed
    if "<" in text:
        return
    assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


def test_merges_run_in_the_order_of_the_file():
    # "h e" stands before "Ġt h", so " the" is cut between t and h
    tokenizer = byte_level_tokenizer()
    assert [tokenizer.token_str(i) for i in tokenizer.encode("hello the helium", add_special=False)] == [
        "hello",
        " t",
        "he",
        " ",
        "hel",
        "i",
        "u",
        "m",
    ]


def test_whole_word_is_one_token_for_llama3_even_without_merges():
    metadata = byte_level("llama-bpe", words=["hello"])
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.merges"] = []
    assert build(metadata).pipeline.encode("hello", add_special_tokens=False).ids == [tokens.index("hello")]
    metadata["tokenizer.ggml.pre"] = "gpt-2"
    assert len(build(metadata).pipeline.encode("hello").ids) == 5


@pytest.mark.parametrize("pre", ["unheard-of", "QWEN2", "", None, 7, ["gpt-2"]])
def test_unknown_pre_is_refused_by_name(pre):
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.pre is") as caught:
        build(byte_level(pre))
    assert repr(pre) in caught.value.message and "smollm" in caught.value.message


def test_missing_pre_is_refused():
    metadata = byte_level()
    del metadata["tokenizer.ggml.pre"]
    with pytest.raises(ModelFileError, match="None"):
        build(metadata)


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", None, 3])
def test_other_tokenizer_model_is_refused_by_name(model):
    with pytest.raises(ModelFileError, match="supported are 'gpt2' and 'llama'"):
        build(byte_level() | {"tokenizer.ggml.model": model})


def test_control_tokens_are_special_and_user_defined_ones_are_text():
    tokenizer = byte_level_tokenizer()
    assert tokenizer.special_ids == {0, 1}
    ids = tokenizer.encode("<tool_call>hello<|end|>", add_special=False)
    assert (ids[0], ids[-1]) == (2, 0)
    assert tokenizer.decode(ids) == "<tool_call>hello"
    assert tokenizer.decode(ids, skip_special=False) == "<tool_call>hello<|end|>"


def test_control_token_outside_the_byte_alphabet_keeps_its_id_and_name():
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"].append("<｜User｜>")
    metadata["tokenizer.ggml.token_type"].append(CONTROL)
    tokenizer = Tokenizer(build(metadata))
    at = tokenizer.vocab_size - 1
    assert tokenizer.encode("a<｜User｜>")[-1] == at
    assert tokenizer.token_str(at) == "<｜User｜>"


def test_user_defined_token_is_its_own_text_and_not_spelled_in_bytes():
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"].append("<café>")
    metadata["tokenizer.ggml.token_type"].append(USER)
    tokenizer = Tokenizer(build(metadata))
    ids = tokenizer.encode("a<café>", add_special=False)
    assert len(ids) == 2 and tokenizer.decode(ids) == "a<café>"


def test_unused_tokens_count_in_the_vocabulary():
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"].append("[PAD1]")
    metadata["tokenizer.ggml.token_type"].append(UNUSED)
    assert Tokenizer(build(metadata)).vocab_size == len(metadata["tokenizer.ggml.tokens"])


@pytest.mark.parametrize(
    ("pre", "flags", "begins", "ends"),
    [
        ("gpt-2", {}, False, False),
        ("gpt-2", {"add_bos_token": True}, True, False),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, True, True),
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("qwen2", {"add_eos_token": True}, False, True),
    ],
)
def test_bos_and_eos_are_added_as_the_flags_say(pre, flags, begins, ends):
    tokenizer = byte_level_tokenizer(pre, **flags)
    ids = tokenizer.encode("x")
    assert ((ids[0] == tokenizer.bos_id), (ids[-1] == tokenizer.eos_id)) == (begins, ends)
    assert len(ids) == 1 + begins + ends
    assert len(tokenizer.encode("x", add_special=False)) == 1


def test_bos_flag_without_a_bos_token_adds_nothing():
    metadata = byte_level("llama-bpe")
    del metadata["tokenizer.ggml.bos_token_id"]
    tokenizer = Tokenizer(build(metadata))
    assert tokenizer.bos_id is None and len(tokenizer.encode("x")) == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tokens": []}, "missing or empty"),
        ({"tokens": "abc"}, "not a list"),
        ({"tokens": ["a", 1]}, "not a list"),
        ({"tokens": ["a", "b", "a"]}, "'a' twice"),
        ({"token_type": [1, 2]}, "2 entries"),
        ({"token_type": ["1"]}, "not a list"),
        ({"merges": ["ab"]}, "does not join"),
        ({"merges": ["h é̄"]}, "does not join"),
        ({"merges": ["z q"]}, "does not join"),
        ({"merges": [" "]}, "does not join"),
        ({"merges": [1]}, "not a list"),
        ({"bos_token_id": 10**6}, "allowed 0 to"),
        ({"eos_token_id": -1}, "allowed 0 to"),
        ({"eos_token_id": "x"}, "allowed 0 to"),
        ({"add_bos_token": "yes"}, "wanted true or false"),
        ({"add_eos_token": 1}, "wanted true or false"),
    ],
)
def test_damaged_metadata_is_refused(change, told):
    metadata = byte_level() | {f"tokenizer.ggml.{name}": value for name, value in change.items()}
    if change.get("tokens"):
        del metadata["tokenizer.ggml.token_type"]
    with pytest.raises(ModelFileError, match=told):
        build(metadata)


def test_sentencepiece_merges_best_score_first():
    tokenizer = sentencepiece_tokenizer()
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("hello world", add_special=False)] == [
        b" hello",
        b" w",
        b"or",
        b"ld",
    ]


def reference_pieces(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE by its definition: join the neighbours with the best joint score, the first of equals, until none fits."""
    pieces = list(text)
    while True:
        joined = [(-scores[a + b], at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not joined:
            return pieces
        at = min(joined)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@given(
    words=st.lists(st.text(alphabet="abc▁", min_size=2, max_size=5), max_size=12, unique=True),
    text=st.text(alphabet="abc ", min_size=1, max_size=24),
)
def test_sentencepiece_ids_follow_its_definition(words, text):
    # as in a trained vocabulary, every token can be built by merges: its prefixes are tokens too, and better ones
    closed = list(dict.fromkeys(word[:end] for word in words for end in range(2, len(word) + 1)))
    scores = dict.fromkeys("abc▁", -1000.0) | {word: -float(n) for n, word in enumerate(closed)}
    tokenizer = Tokenizer(build(sentencepiece(scores)))
    got = [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(text, add_special=False)]
    expected = reference_pieces("▁" + text.replace(" ", "▁"), scores)
    assert got == [piece.replace("▁", " ") for piece in expected]


def test_sentencepiece_writes_unknown_characters_as_bytes():
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode("é", add_special=False)
    assert [tokenizer.token_bytes(i) for i in ids] == [b" ", b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids) == "é"


@given(text=TEXT)
def test_sentencepiece_round_trip_keeps_every_text(text):
    tokenizer = shared_sentencepiece()
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text or "<" in text or "▁" in text


@cache
def shared_sentencepiece() -> Tokenizer:
    return sentencepiece_tokenizer()


def test_sentencepiece_adds_bos_unless_told_otherwise():
    assert sentencepiece_tokenizer().encode("hello")[0] == 1
    assert sentencepiece_tokenizer(add_bos_token=False).encode("hello")[0] != 1


def test_sentencepiece_puts_a_space_after_each_special_token():
    tokenizer = sentencepiece_tokenizer()
    pieces = [tokenizer.token_bytes(i) for i in tokenizer.encode("<s>hello</s>hello", add_special=False)]
    assert pieces == [b"<s>", b" hello", b"</s>", b" hello"]


def test_sentencepiece_without_prefix_keeps_text_as_it_is():
    tokenizer = sentencepiece_tokenizer(add_space_prefix=False)
    ids = tokenizer.encode(" hello", add_special=False)
    assert tokenizer.token_bytes(ids[0]) == b" hello"
    assert tokenizer.decode(ids) == " hello"
    assert not tokenizer.strip_space


def test_byte_and_control_tokens_are_never_merged_from_text():
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode("<0x0A>", add_special=False)
    assert len(ids) > 1 and tokenizer.decode(ids) == "<0x0A>"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"scores": [0.0]}, "scores has 1 entries"),
        ({"scores": []}, "scores has 0 entries"),
        ({"scores": [1]}, "not a list of float"),
        ({"unknown_token_id": 10**9}, "allowed 0 to"),
        ({"add_space_prefix": 1}, "wanted true or false"),
    ],
)
def test_damaged_sentencepiece_metadata_is_refused(change, told):
    metadata = sentencepiece(PIECES | LETTERS)
    with pytest.raises(ModelFileError, match=told):
        build(metadata | {f"tokenizer.ggml.{name}": value for name, value in change.items()})


def test_hostile_token_length_is_refused_before_it_costs_time():
    with pytest.raises(ModelFileError, match="limit 1024"):
        build(sentencepiece({"a": -1.0, "a" * 100_000: -2.0}))


def test_tokenizer_is_read_from_a_gguf_file(tmp_path):
    metadata = byte_level(add_bos_token=True)
    kinds = {"tokens": STRING, "token_type": I32, "merges": STRING, "scores": F32}
    keys = []
    for key, value in metadata.items():
        if isinstance(value, list):
            keys.append((key, array(kinds[key.rpartition(".")[2]], value)))
        else:
            kind = {str: STRING, bool: BOOL, int: U32}[type(value)]
            keys.append((key, scalar(kind, value)))
    path = tmp_path / "tiny.gguf"
    path.write_bytes(GgufBytes(keys=keys).build())
    tokenizer = Tokenizer.from_files(Files("gguf", path))
    assert tokenizer.encode("hello") == Tokenizer(build(metadata)).encode("hello")
    assert tokenizer.encode("hello")[0] == tokenizer.bos_id == 1


def test_types_of_tokens_are_those_of_the_format():
    assert (NORMAL, CONTROL, USER, UNUSED, BYTE) == (1, 3, 4, 5, 6)
