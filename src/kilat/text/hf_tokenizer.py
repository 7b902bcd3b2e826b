"""The tokenizer of a Hugging Face directory: tokenizer.json, with the tokens that only tokenizer_config.json names.

What is put around a text is what tokenizer.json says; ``add_bos_token`` of the config is from before it, and not read.
"""

from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as Pipeline

from kilat.base.errors import ModelFileError
from kilat.text.pipeline import Built
from kilat.text.spelling import SPACE, Spelling

MAX_FILE_BYTES = 128 << 20

_Token = str | dict[str, Any] | None
_T = TypeVar("_T")


class TokenizerConfig(msgspec.Struct, frozen=True):
    """The fields of tokenizer_config.json that text/ reads; a token is a string or an object with ``content``.

    ``chat_template`` is a template, or a list of ``{"name": ..., "template": ...}``.
    """

    bos_token: _Token = None
    eos_token: _Token = None
    unk_token: _Token = None
    pad_token: _Token = None
    additional_special_tokens: list[str | dict[str, Any]] | None = None
    added_tokens_decoder: dict[str, dict[str, Any]] | None = None
    chat_template: str | list[dict[str, str]] | None = None


class _PipelineFile(msgspec.Struct):
    decoder: dict[str, Any] | None = None


def build(path: Path) -> Built:
    """Pipeline of the directory ``path``; raises ModelFileError when a file is missing, damaged or of an unknown kind."""
    if not (path / "tokenizer.json").is_file():
        raise ModelFileError(
            f"{path.name} has no tokenizer.json, and no other format is read: "
            "load it with transformers' AutoTokenizer and save_pretrained it"
        )
    raw = read_file(path / "tokenizer.json")
    spelling = _spelling(_decode(raw, _PipelineFile, "tokenizer.json").decoder)
    try:
        pipeline = Pipeline.from_str(raw.decode("utf-8"))
    except Exception as e:
        # the library raises bare Exception for everything it cannot read
        raise ModelFileError(f"tokenizer.json cannot be read: {e}") from e
    pipeline.no_truncation()
    pipeline.no_padding()
    config = read_config(path)
    _add_missing(pipeline, config)
    bos_id, eos_id = _id_of(pipeline, config.bos_token), _id_of(pipeline, config.eos_token)
    return Built(pipeline, spelling, bos_id, eos_id)


def read_config(path: Path) -> TokenizerConfig:
    """tokenizer_config.json of the directory ``path``, with special_tokens_map.json for what it leaves out; both may be missing."""
    config = TokenizerConfig()
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (path / name).is_file():
            found = msgspec.structs.asdict(_decode(read_file(path / name), TokenizerConfig, name))
            config = msgspec.structs.replace(config, **{k: v for k, v in found.items() if v is not None})
    return config


def read_file(path: Path) -> bytes:
    """Content of a file of at most 128 MiB; raises ModelFileError when it is larger or cannot be read."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ModelFileError(f"{path.name} has {size} bytes, limit {MAX_FILE_BYTES}")
        return path.read_bytes()
    except OSError as e:
        raise ModelFileError(f"{path.name} cannot be read: {e.strerror}") from e


def _decode(raw: bytes, kind: type[_T], name: str) -> _T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ModelFileError(f"{name} cannot be read: {e}") from e


def _spelling(decoder: dict[str, Any] | None) -> Spelling:
    """What the decoder of a tokenizer.json says about the vocabulary."""
    steps = (
        (decoder or {}).get("decoders", []) if (decoder or {}).get("type") == "Sequence" else [decoder or {}]
    )
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return Spelling(byte_level=True)
    for step in steps:
        known = {
            "Replace": step.get("pattern") == {"String": SPACE} and step.get("content") == " ",
            "Strip": step.get("content") == " " and step.get("start") == 1 and step.get("stop") == 0,
            "Metaspace": step.get("replacement") == SPACE,
            "ByteFallback": True,
            "Fuse": True,
        }
        if not known.get(step.get("type", ""), False):
            raise ModelFileError(
                f"tokenizer.json has the decoder step {step!r:.200}: known are ByteLevel, and SentencePiece's "
                "Replace, ByteFallback, Fuse, Strip and Metaspace"
            )
    prefix = any(s["type"] == "Metaspace" and s.get("prepend_scheme", "always") != "never" for s in steps)
    return Spelling(False, byte_fallback="ByteFallback" in kinds, strip_space="Strip" in kinds or prefix)


def _add_missing(pipeline: Pipeline, config: TokenizerConfig) -> None:
    """Added and special tokens that only the config knows."""
    known = {token.content for token in pipeline.get_added_tokens_decoder().values()}
    listed = [
        AddedToken(
            _content(entry),
            **{k: bool(entry.get(k)) for k in ("special", "lstrip", "rstrip", "single_word", "normalized")},
        )
        for _, entry in sorted(
            (config.added_tokens_decoder or {}).items(), key=lambda item: (len(item[0]), item[0])
        )
    ]
    named = [config.bos_token, config.eos_token, config.unk_token, config.pad_token]
    named += config.additional_special_tokens or []
    listed += [AddedToken(_content(t), special=True, normalized=False) for t in named if t is not None]
    for token in listed:
        if token.content not in known:
            known.add(token.content)
            pipeline.add_tokens([token])


def _content(token: str | dict[str, Any]) -> str:
    content = token if isinstance(token, str) else token.get("content")
    if not isinstance(content, str):
        raise ModelFileError(
            f"tokenizer_config.json names the token {token!r:.100}, wanted a string or an object with content"
        )
    return content


def _id_of(pipeline: Pipeline, token: _Token) -> int | None:
    found = None if token is None else pipeline.token_to_id(_content(token))
    return found if found is None else int(found)
