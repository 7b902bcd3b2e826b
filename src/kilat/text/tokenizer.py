"""Token ids of a text and back, for Hugging Face directories and GGUF files.

Encoding is done by the ``tokenizers`` library. Decoding is defined here, on bytes: the text of some ids is the UTF-8 text of
their bytes one after the other, with U+FFFD for what is not UTF-8. So no later id changes a finished character, and a text can
be streamed.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from kilat.base import gguf_header
from kilat.base.errors import RequestError
from kilat.text import gguf_tokenizer, hf_tokenizer
from kilat.text.pipeline import Built


class Files(Protocol):
    """Where a model lies: ``kind`` is ``hf`` (``path`` is a directory) or ``gguf`` (``path`` is a file)."""

    @property
    def kind(self) -> str: ...
    @property
    def path(self) -> Path: ...


class Tokenizer:
    """Immutable and safe to share between threads.

    ``vocab_size`` is the largest id plus one; a model may have more rows, whose ids stand for no text. ``special_ids`` are control
    tokens: they are no part of a text, though a text that spells one encodes to it. ``bytes_table[id]`` are the bytes of an id.
    ``strip_space``: see :class:`~kilat.text.spelling.Spelling`.
    """

    def __init__(self, built: Built) -> None:
        self._pipeline = built.pipeline
        self.bos_id = built.bos_id
        self.eos_id = built.eos_id
        self.strip_space = built.spelling.strip_space
        vocab = built.pipeline.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocab.values(), default=-1) + 1)
        bytes_of = built.spelling.bytes_of
        for token, i in vocab.items():
            table[i] = bytes_of(token)
        added = built.pipeline.get_added_tokens_decoder()
        for i, added_token in added.items():
            table[i] = added_token.content.encode("utf-8")
        self.bytes_table = tuple(table)
        self.vocab_size = len(table)
        self.special_ids = frozenset(i for i, added_token in added.items() if added_token.special)

    @classmethod
    def from_files(cls, files: Files) -> "Tokenizer":
        """The tokenizer of a model; raises ModelFileError when its files are missing, damaged or of an unknown kind."""
        if files.kind == "gguf":
            return cls(gguf_tokenizer.build(gguf_header.read(files.path).metadata))
        return cls(hf_tokenizer.build(files.path))

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of ``text``. ``add_special`` puts BOS and EOS around it where the model wants them; a rendered chat has them already.
        Raises RequestError for a lone surrogate."""
        try:
            return list(self._pipeline.encode(text, add_special_tokens=add_special).ids)
        except TypeError as e:
            raise RequestError(
                "the text has a lone surrogate (half of a \\uXXXX pair): send valid Unicode"
            ) from e

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continues: bool = False) -> str:
        """Text of ``ids``. ``continues``: it goes on after other text, so SentencePiece's space at its start is kept."""
        skip = self.special_ids if skip_special else frozenset()
        text = b"".join(self.token_bytes(i) for i in ids if i not in skip).decode("utf-8", "replace")
        return text[1:] if self.strip_space and not continues and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one id stands for; none for an id outside the vocabulary."""
        return self.bytes_table[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_str(self, token_id: int) -> str:
        """Text of one id, with U+FFFD for a piece of a character; a special token gives its name, as ``<|im_end|>``."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def to_json(self) -> str:
        """The pipeline as the text of a Hugging Face tokenizer.json."""
        return str(self._pipeline.to_str())
