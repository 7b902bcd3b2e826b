"""What a resolved model is: where its files are and how they are stored. JSON files of models are read here too."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kilat.base.errors import ModelFileError

MAX_JSON_BYTES: Final = 100 << 20
# Commas, colons and opening brackets: they bound the objects that parsing creates. A checkpoint needs about 16 per tensor.
MAX_JSON_PARTS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk: ``path`` is a Hugging Face directory (``hf``) or a GGUF file; ``name`` is what users call it."""

    kind: Literal["hf", "gguf"]
    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """What a file that is downloaded must be, whoever serves it."""

    name: str
    n_bytes: int
    sha256: str


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in the file at ``path``; raises ModelFileError when it is missing, too large or not an object."""
    try:
        n_bytes = path.stat().st_size
        if n_bytes > MAX_JSON_BYTES:
            raise ModelFileError(f"{path.name} has {n_bytes} bytes, limit {MAX_JSON_BYTES}")
        raw = path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"cannot read {path.name}: {error.strerror or error}") from error
    return parse_json(raw, path.name)


def parse_json(raw: bytes, what: str) -> dict[str, object]:
    """The JSON object in ``raw``. Untrusted text: size, nesting and duplicate keys are checked; raises ModelFileError."""
    parts = sum(raw.count(sign) for sign in (b",", b":", b"[", b"{"))
    if parts > MAX_JSON_PARTS:
        raise ModelFileError(f"{what} has {parts} JSON values, limit {MAX_JSON_PARTS}: the file is damaged")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_distinct, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{what} is not valid JSON ({error}): the file is damaged") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{what} holds a JSON {type(value).__name__}, expected an object")
    return value


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")
