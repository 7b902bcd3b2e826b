"""How vocabularies write bytes: GPT-2's printable alphabet, and SentencePiece with byte tokens."""

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

SPACE = "\u2581"
"""SentencePiece's visible space."""

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(b for b in range(256) if b not in _PRINTABLE)

CHAR_OF_BYTE: Final = MappingProxyType(
    {b: chr(b) for b in _PRINTABLE} | {b: chr(256 + n) for n, b in enumerate(_OTHERS)}
)
"""Byte value -> its character in a byte-level vocabulary: printable Latin-1 stands for itself, the other 68 bytes follow from
U+0100 on (Radford et al. 2019)."""

# str.translate table back to Latin-1; a Latin-1 character that stands for no byte becomes one that Latin-1 cannot encode
_TO_LATIN: Final = MappingProxyType(
    dict.fromkeys(_OTHERS, "\uffff") | {ord(c): chr(b) for b, c in CHAR_OF_BYTE.items()}
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Spelling:
    """How one vocabulary writes bytes.

    ``byte_level``: GPT-2's alphabet, otherwise SentencePiece's. ``byte_fallback``: ``<0x0A>`` stands for that byte.
    ``strip_space``: a space at the very start of a text belongs to the encoding, not to the text.
    """

    byte_level: bool
    byte_fallback: bool = False
    strip_space: bool = False

    def bytes_of(self, token: str) -> bytes:
        """Bytes that an ordinary token stands for; one outside the byte-level alphabet stands for its own UTF-8."""
        if self.byte_level:
            try:
                return token.translate(_TO_LATIN).encode("latin-1")
            except UnicodeEncodeError:
                return token.encode("utf-8")
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(SPACE, " ").encode("utf-8")
