"""Checks the header of a safetensors file before the library opens it: sizes, offsets, overlap. Needs no torch.

Source of the layout: the format section of the safetensors repository's README.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeGuard

from kilat.base.errors import ModelFileError
from kilat.load.files import MAX_JSON_BYTES, parse_json

MAX_DIMS: Final = 8
# Bits of one value of each type of the format.
_BITS: Final = MappingProxyType(
    {
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "BOOL": 8,
        "U8": 8,
        "I8": 8,
        "F8_E4M3": 8,
        "F8_E5M2": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "U16": 16,
        "I16": 16,
        "F16": 16,
        "BF16": 16,
        "U32": 32,
        "I32": 32,
        "F32": 32,
        "U64": 64,
        "I64": 64,
        "F64": 64,
        "C64": 64,
    }
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: safetensors type name, shape, and the bytes ``begin`` to ``end`` of the data part."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Entry]:
    """Tensors of the safetensors file at ``path`` by name; raises ModelFileError when the file is damaged or hostile."""
    try:
        with open(path, "rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or header_bytes > file_bytes - 8:
                raise ModelFileError(
                    f"{path.name} has {file_bytes} bytes, its header alone needs {header_bytes}: the file is cut short or "
                    "not a safetensors file, download it again"
                )
            if header_bytes > MAX_JSON_BYTES:
                raise ModelFileError(f"{path.name}: header of {header_bytes} bytes, limit {MAX_JSON_BYTES}")
            raw = file.read(header_bytes)
    except OSError as error:
        raise ModelFileError(f"cannot read {path.name}: {error.strerror or error}") from error
    header = parse_json(raw, f"header of {path.name}")
    header.pop("__metadata__", None)
    entries = {name: _entry(name, value, path.name) for name, value in header.items()}
    _check_layout(entries, file_bytes - 8 - header_bytes, path.name)
    return entries


def _entry(name: str, value: object, file_name: str) -> Entry:
    def damaged(what: str) -> ModelFileError:
        return ModelFileError(f"{file_name}: tensor {name[:200]!r} {what}: the file is damaged")

    if not isinstance(value, dict):
        raise damaged("is not described by an object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise damaged(f"has unknown type {str(dtype)[:40]!r}")
    if not _naturals(shape) or len(shape) > MAX_DIMS:
        raise damaged(f"has no valid shape of at most {MAX_DIMS} dimensions")
    if not _naturals(offsets) or len(offsets) != 2:
        raise damaged("has no valid data_offsets")
    begin, end = offsets
    # Each factor is below 2^63 (see _naturals), so the product of at most 8 of them stays a small integer.
    n_bits = math.prod(shape) * _BITS[dtype]
    if n_bits % 8 or end - begin != n_bits // 8:
        raise damaged(
            f"of {dtype} {list(shape)} needs {n_bits / 8:g} bytes, its data_offsets span {end - begin}"
        )
    return Entry(dtype, tuple(shape), begin, end)


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _check_layout(entries: dict[str, Entry], data_bytes: int, file_name: str) -> None:
    """The tensors fill the data part exactly, without holes and without overlap."""
    end, before = 0, "start"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            what = "overlaps" if entry.begin < end else "leaves a hole after"
            raise ModelFileError(
                f"{file_name}: tensor {name[:200]!r} {what} {before[:200]!r}: the file is damaged"
            )
        end, before = entry.end, name
    if end != data_bytes:
        what = "is cut short, download it again" if end > data_bytes else "has bytes that belong to no tensor"
        raise ModelFileError(
            f"{file_name}: tensors take {end} bytes, the file has {data_bytes} for them: it {what}"
        )
