"""The alphabet of byte-level vocabularies and the bytes of tokens."""

import pytest

from kilat.text.spelling import CHAR_OF_BYTE, Spelling

pytestmark = pytest.mark.logic


def test_every_byte_has_one_character_of_its_own():
    assert sorted(CHAR_OF_BYTE) == list(range(256))
    assert len(set(CHAR_OF_BYTE.values())) == 256


def test_characters_of_bytes_are_printable():
    assert all(char.isprintable() and not char.isspace() for char in CHAR_OF_BYTE.values())


def test_space_and_newline_have_the_letters_seen_in_gpt2_vocabularies():
    assert (CHAR_OF_BYTE[ord(" ")], CHAR_OF_BYTE[ord("\n")], CHAR_OF_BYTE[ord("A")]) == ("Ġ", "Ċ", "A")


@pytest.mark.parametrize("byte", range(256))
def test_byte_level_token_of_one_character_is_that_byte(byte):
    assert Spelling(byte_level=True).bytes_of(CHAR_OF_BYTE[byte]) == bytes([byte])


def test_byte_level_token_spells_utf8_through_the_alphabet():
    text = "naïve 日本 🙂\n"
    token = "".join(CHAR_OF_BYTE[byte] for byte in text.encode())
    assert Spelling(byte_level=True).bytes_of(token) == text.encode()


@pytest.mark.parametrize("token", ["<｜User｜>", "two words", "\x7f", "日"])
def test_token_outside_the_alphabet_stands_for_its_own_text(token):
    assert Spelling(byte_level=True).bytes_of(token) == token.encode()


@pytest.mark.parametrize(
    ("token", "expected"),
    [("▁the", b" the"), ("a▁b", b"a b"), ("<0x0A>", b"\n"), ("<0xfF>", b"\xff"), ("<0x0A>x", b"<0x0A>x")],
)
def test_sentencepiece_token_gives_spaces_and_bytes(token, expected):
    assert Spelling(byte_level=False, byte_fallback=True).bytes_of(token) == expected


def test_byte_token_is_plain_text_where_the_vocabulary_has_no_bytes():
    assert Spelling(byte_level=False).bytes_of("<0x0A>") == b"<0x0A>"
