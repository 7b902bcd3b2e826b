"""A model's config and its end-of-text ids, from a Hugging Face directory or from GGUF metadata. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from kilat.base import gguf_header
from kilat.base.errors import ConfigError
from kilat.load import gguf_config
from kilat.load.files import ModelFiles, read_json


@dataclass(frozen=True, slots=True)
class Generation:
    """``eos_ids`` end a text (may be empty), ``bos_id`` starts one, ``max_model_len`` is the trained context in tokens."""

    eos_ids: tuple[int, ...]
    bos_id: int | None
    max_model_len: int


def read_config(files: ModelFiles) -> dict[str, object]:
    """Config with Hugging Face field names (``model_type``, ``hidden_size`` ...).

    For a directory it is config.json as it stands; its meaning is checked by the model that reads it. For a GGUF file every
    metadata field of the architecture is either translated or refused. Raises ModelFileError or ConfigError.
    """
    if files.kind == "gguf":
        return gguf_config.config_of(gguf_header.read(files.path), files.path)
    config = read_json(files.path / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(
            "config.json has no model_type: this is not a model directory that transformers can read either"
        )
    return config


def read_generation(files: ModelFiles) -> Generation:
    """How texts of this model begin and end; raises ModelFileError or ConfigError."""
    if files.kind == "gguf":
        header = gguf_header.read(files.path)
        eos_ids, bos_id = gguf_config.special_ids(header, files.path.name)
        return Generation(eos_ids, bos_id, gguf_config.context_length(header, files.path.name))
    config = read_config(files)
    path = files.path / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    eos_ids = _ids(generation, "eos_token_id") or _ids(config, "eos_token_id")
    bos_ids = _ids(generation, "bos_token_id") or _ids(config, "bos_token_id")
    length = config.get("max_position_embeddings")
    if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= 1 << 24:
        raise ConfigError(
            f"config.json: max_position_embeddings is {length!r}, allowed 1 to {1 << 24}; add it to config.json"
        )
    return Generation(eos_ids, bos_ids[0] if bos_ids else None, length)


def _ids(config: Mapping[str, object], key: str) -> tuple[int, ...]:
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise ConfigError(f"{key} is {value!r}, expected a token id or a list of them")
    return tuple(dict.fromkeys(ids))
