"""Small tokenizers, made as the metadata of a GGUF file would have them."""

import json
from dataclasses import dataclass
from pathlib import Path

from kilat.text.gguf_tokenizer import build
from kilat.text.spelling import CHAR_OF_BYTE
from kilat.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPECIALS = ["<|end|>", "<|start|>"]
USER_DEFINED = ["<tool_call>", "</tool_call>"]
WORDS = ["hello", "world", "Ġthe", "Ġworld", "ĠĠ", "ing", "STOP", "ðŁĺ"]


@dataclass(frozen=True)
class Files:
    """Where a model lies, as load/ would say it."""

    kind: str
    path: Path


def byte_level(pre: str = "gpt-2", words: list[str] = WORDS, **more: object) -> dict[str, object]:
    """Metadata of a byte-level vocabulary: specials, user-defined tokens, 256 bytes, and ``words`` with merges from the left."""
    tokens = [*SPECIALS, *USER_DEFINED, *CHAR_OF_BYTE.values()]
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    types = [CONTROL] * len(SPECIALS) + [USER] * len(USER_DEFINED)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types + [NORMAL] * (len(tokens) - len(types)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        **{f"tokenizer.ggml.{name}": value for name, value in more.items()},
    }


def sentencepiece(pieces: dict[str, float], **more: object) -> dict[str, object]:
    """Metadata of a SentencePiece vocabulary: unknown, BOS, EOS, 256 byte tokens and ``pieces`` with their scores."""
    rows = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    rows += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    rows += [(piece, score, NORMAL) for piece, score in pieces.items()]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [row[0] for row in rows],
        "tokenizer.ggml.scores": [row[1] for row in rows],
        "tokenizer.ggml.token_type": [row[2] for row in rows],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{name}": value for name, value in more.items()},
    }


PIECES = {
    piece: -float(rank) for rank, piece in enumerate(["▁h", "lo", "el", "ello", "▁hello", "▁w", "or", "ld"])
}
LETTERS = {letter: -100.0 - n for n, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz.,!")}


def byte_level_tokenizer(pre: str = "gpt-2", **more: object) -> Tokenizer:
    return Tokenizer(build(byte_level(pre, **more)))


def sentencepiece_tokenizer(**more: object) -> Tokenizer:
    return Tokenizer(build(sentencepiece(PIECES | LETTERS, **more)))


def write_directory(path: Path, tokenizer: Tokenizer, config: dict[str, object] | None = None) -> Files:
    """A Hugging Face directory with ``tokenizer``."""
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Files("hf", path)
