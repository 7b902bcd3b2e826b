"""Tokenizers of Hugging Face directories."""

import json

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from kilat.base.errors import ModelFileError, RequestError
from kilat.text.hf_tokenizer import read_config, read_file
from kilat.text.tokenizer import Tokenizer
from tests.text.tiny import Files, byte_level_tokenizer, sentencepiece_tokenizer, write_directory

pytestmark = pytest.mark.logic
TEXT = "hello the world<|end|> STOP é 🙂 \n<tool_call>"


@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece_tokenizer])
def test_directory_written_from_a_tokenizer_gives_the_same_tokenizer(make, tmp_path):
    first = make()
    again = Tokenizer.from_files(write_directory(tmp_path, first))
    ids = first.encode(TEXT)
    assert again.encode(TEXT) == ids
    assert again.bytes_table == first.bytes_table
    assert again.special_ids == first.special_ids
    assert again.decode(ids) == first.decode(ids)
    assert again.strip_space == first.strip_space
    assert json.loads(again.to_json()) == json.loads(first.to_json())


@pytest.mark.parametrize("as_object", [False, True])
def test_config_names_bos_and_eos(as_object, tmp_path):
    config = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    if as_object:
        config = {name: {"content": token, "special": True} for name, token in config.items()}
    tokenizer = Tokenizer.from_files(write_directory(tmp_path, byte_level_tokenizer(), config))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 0)


def test_directory_without_config_has_no_bos_and_eos(tmp_path):
    tokenizer = Tokenizer.from_files(write_directory(tmp_path, byte_level_tokenizer()))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, None)


def test_special_tokens_map_fills_in_what_the_config_leaves_out(tmp_path):
    files = write_directory(tmp_path, byte_level_tokenizer(), {"eos_token": "<|end|>", "bos_token": None})
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<|start|>", "eos_token": "hello"}')
    tokenizer = Tokenizer.from_files(files)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 0)


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize(
    "told", [{}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}]
)
def test_tokenizer_json_decides_about_bos(stored, told, tmp_path):
    config = {"bos_token": "<|start|>", "eos_token": "<|end|>", **told}
    ids = Tokenizer.from_files(
        write_directory(tmp_path, byte_level_tokenizer(add_bos_token=stored), config)
    ).encode("x")
    assert (ids[0] == 1, len(ids)) == (stored, 1 + stored)


def test_tokens_that_only_the_config_knows_are_added(tmp_path):
    n = byte_level_tokenizer().vocab_size
    added = {
        str(n + 1): {"content": "<extra>", "special": False},
        str(n): {"content": "<|mark|>", "special": True},
    }
    config = {"added_tokens_decoder": added, "pad_token": "<|pad|>", "additional_special_tokens": ["<|end|>"]}
    tokenizer = Tokenizer.from_files(write_directory(tmp_path, byte_level_tokenizer(), config))
    assert tokenizer.encode("<|mark|><extra><|pad|>") == [n, n + 1, n + 2]
    assert tokenizer.special_ids == {0, 1, n, n + 2}


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    files = write_directory(tmp_path, byte_level_tokenizer())
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    stored["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    stored["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|end|>",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    assert Tokenizer.from_files(files).encode("hello world") == byte_level_tokenizer().encode("hello world")


def test_metaspace_decoder_is_sentencepiece(tmp_path):
    pipeline = Pipeline(models.BPE({"▁a": 0, "b": 1, "▁": 2, "a": 3}, [("▁", "a")]))
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace()
    pipeline.decoder = decoders.Metaspace()
    pipeline.add_tokens([AddedToken("<x>", special=False)])
    (tmp_path / "tokenizer.json").write_text(pipeline.to_str())
    tokenizer = Tokenizer.from_files(Files("hf", tmp_path))
    ids = tokenizer.encode("ab a")
    assert tokenizer.decode(ids) == pipeline.decode(ids) == "ab a"
    assert tokenizer.decode(ids, continues=True) == " ab a"


@pytest.mark.parametrize(
    "decoder",
    [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}, {"type": "BPEDecoder", "suffix": "</w>"}],
)
def test_decoder_that_is_not_known_is_refused(decoder, tmp_path):
    files = write_directory(tmp_path, byte_level_tokenizer())
    stored = json.loads((tmp_path / "tokenizer.json").read_text()) | {"decoder": decoder}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(ModelFileError, match="decoder step"):
        Tokenizer.from_files(files)


@pytest.mark.parametrize(
    "step",
    [
        {"type": "Replace", "pattern": {"String": "_"}, "content": " "},
        {"type": "Strip", "content": " ", "start": 2, "stop": 0},
        {"type": "Nonsense"},
    ],
)
def test_sentencepiece_decoder_with_an_odd_step_is_refused(step, tmp_path):
    files = write_directory(tmp_path, sentencepiece_tokenizer())
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    stored["decoder"]["decoders"].append(step)
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(ModelFileError, match="decoder step"):
        Tokenizer.from_files(files)


def test_directory_without_tokenizer_json_says_what_to_do(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelFileError, match="save_pretrained"):
        Tokenizer.from_files(Files("hf", tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"decoder": {"type": "ByteLevel"}}',
        b'{"decoder": {"type": "ByteLevel"}, "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
        b'{"decoder": {"type": "ByteLevel"}, "x": "\xff"}',
        b'{"decoder": ' + b"[" * 100_000,
    ],
)
def test_damaged_tokenizer_json_is_refused(content, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        Tokenizer.from_files(Files("hf", tmp_path))


@pytest.mark.parametrize("content", ["{", "[1]", '{"bos_token": 7}', '{"added_tokens_decoder": []}'])
def test_damaged_tokenizer_config_is_refused(content, tmp_path):
    files = write_directory(tmp_path, byte_level_tokenizer())
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json"):
        Tokenizer.from_files(files)


def test_token_object_without_content_is_refused(tmp_path):
    files = write_directory(tmp_path, byte_level_tokenizer(), {"eos_token": {"text": "x"}})
    with pytest.raises(ModelFileError, match="object with content"):
        Tokenizer.from_files(files)


def test_config_of_an_empty_directory_is_empty(tmp_path):
    assert read_config(tmp_path).bos_token is None


def test_file_over_the_limit_is_not_read(tmp_path):
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate((128 << 20) + 1)  # a hole: takes no disk
    with pytest.raises(ModelFileError, match="limit 134217728"):
        read_file(path)


def test_unreadable_file_is_named(tmp_path):
    with pytest.raises(ModelFileError, match=r"gone\.json cannot be read"):
        read_file(tmp_path / "gone.json")


def test_lone_surrogate_is_the_clients_mistake():
    with pytest.raises(RequestError, match="surrogate"):
        byte_level_tokenizer().encode("a\ud800b")


def test_ids_outside_the_vocabulary_stand_for_no_text():
    tokenizer = byte_level_tokenizer()
    assert tokenizer.decode([tokenizer.vocab_size, 10**9]) == ""
    assert tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.token_str(10**9) == ""


def test_piece_of_a_character_shows_as_replacement():
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode("é", add_special=False)
    assert [tokenizer.token_bytes(i) for i in ids] == [b"\xc3", b"\xa9"]
    assert tokenizer.token_str(ids[0]) == "\ufffd"
    assert tokenizer.decode(ids[:1]) == "\ufffd"
    assert tokenizer.decode(ids) == "é"
