"""Reads the header of a GGUF file (versions 2 and 3, little endian): metadata and tensor table, no tensor data.

The file is not trusted: every count, length and offset is checked against the file's size, and against a fixed limit, before it
is used, so a hostile file costs a bounded amount of time and memory and ends in :class:`ModelFileError`.
Source of the layout: the GGUF specification in the ggml repository (docs/gguf.md).
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from kilat.base.errors import ModelFileError

# The largest real headers (400k-token vocabularies with merges) stay far below these.
MAX_HEADER_BYTES = 256 << 20
MAX_ARRAY_ITEMS = 1 << 22
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 1024
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20

_STRING = 8
_ARRAY = 9
_BOOL = 7
# GGUF value type -> struct format of one little-endian item.
_SCALARS: Final = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
)


class GgmlType(NamedTuple):
    """Storage format of a tensor: ``block_bytes`` bytes hold ``block_items`` values of one row."""

    name: str
    block_items: int
    block_bytes: int


GGML_TYPES: Final = MappingProxyType(
    {
        0: GgmlType("F32", 1, 4),
        1: GgmlType("F16", 1, 2),
        2: GgmlType("Q4_0", 32, 18),
        3: GgmlType("Q4_1", 32, 20),
        6: GgmlType("Q5_0", 32, 22),
        7: GgmlType("Q5_1", 32, 24),
        8: GgmlType("Q8_0", 32, 34),
        9: GgmlType("Q8_1", 32, 40),
        10: GgmlType("Q2_K", 256, 84),
        11: GgmlType("Q3_K", 256, 110),
        12: GgmlType("Q4_K", 256, 144),
        13: GgmlType("Q5_K", 256, 176),
        14: GgmlType("Q6_K", 256, 210),
        15: GgmlType("Q8_K", 256, 292),
        16: GgmlType("IQ2_XXS", 256, 66),
        17: GgmlType("IQ2_XS", 256, 74),
        18: GgmlType("IQ3_XXS", 256, 98),
        19: GgmlType("IQ1_S", 256, 50),
        20: GgmlType("IQ4_NL", 32, 18),
        21: GgmlType("IQ3_S", 256, 110),
        22: GgmlType("IQ2_S", 256, 82),
        23: GgmlType("IQ4_XS", 256, 136),
        24: GgmlType("I8", 1, 1),
        25: GgmlType("I16", 1, 2),
        26: GgmlType("I32", 1, 4),
        27: GgmlType("I64", 1, 8),
        28: GgmlType("F64", 1, 8),
        29: GgmlType("IQ1_M", 256, 56),
        30: GgmlType("BF16", 1, 2),
        34: GgmlType("TQ1_0", 256, 54),
        35: GgmlType("TQ2_0", 256, 66),
        39: GgmlType("MXFP4", 32, 17),
        40: GgmlType("NVFP4", 64, 36),
        41: GgmlType("Q1_0", 128, 18),
    }
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: ``shape`` in HF order (rows first), ``offset`` in bytes from the header's ``data_offset``."""

    name: str
    ggml_type: int
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata (str, int, float, bool or a list of one of them) and tensor table of one file, in file order.

    Every tensor lies inside the file, at ``data_offset + offset``, and overlaps no other.
    """

    metadata: dict[str, object]
    tensors: dict[str, TensorInfo]
    data_offset: int
    alignment: int
    file_bytes: int


def read(path: Path) -> GgufHeader:
    """Header of the GGUF file at ``path``; raises ModelFileError when the file is damaged, hostile or unreadable."""
    try:
        with open(path, "rb") as file:
            file_bytes = file.seek(0, 2)
            if file_bytes < 24:
                raise ModelFileError(
                    f"{Path(path).name} has {file_bytes} bytes, a GGUF header needs at least 24: the file is cut short"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _parse(_Cursor(view, file_bytes, Path(path).name))
    except OSError as error:
        raise ModelFileError(f"cannot read {Path(path).name}: {error.strerror or error}") from error


class _Cursor:
    """Reads forward through a header; every read checks the end first."""

    def __init__(self, view: mmap.mmap, file_bytes: int, name: str) -> None:
        self.view = view
        self.file_bytes = file_bytes
        self.name = name
        self.end = min(file_bytes, MAX_HEADER_BYTES)
        self.pos = 0
        self.items_left = MAX_ARRAY_ITEMS

    def error(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.name}: {message}")

    def claim(self, n_bytes: int, what: str) -> int:
        """Position of the next ``n_bytes`` bytes, which are skipped."""
        pos = self.pos
        if n_bytes > self.end - pos:
            limit = "the file ends" if self.end == self.file_bytes else "the header's limit is"
            raise self.error(
                f"{what} needs {n_bytes} bytes at offset {pos}, but {limit} at {self.end}: "
                "the file is cut short or damaged, download it again"
            )
        self.pos = pos + n_bytes
        return pos

    def number(self, code: str, what: str) -> int | float:
        pos = self.claim(struct.calcsize("<" + code), what)
        value: int | float = struct.unpack_from("<" + code, self.view, pos)[0]
        return value

    def count(self, what: str, limit: int, code: str = "Q") -> int:
        value = int(self.number(code, what))
        if value > limit:
            raise self.error(f"{what} is {value}, limit {limit}: the file is damaged")
        return value

    def text(self, what: str, limit: int = MAX_HEADER_BYTES) -> str:
        n_bytes = self.count(f"length of {what}", limit)
        pos = self.claim(n_bytes, what)
        return self.decode(pos, pos + n_bytes, what)

    def decode(self, begin: int, end: int, what: str) -> str:
        try:
            return self.view[begin:end].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} at offset {begin} is not UTF-8 text: the file is damaged") from error


def _parse(cursor: _Cursor) -> GgufHeader:
    n_tensors, n_keys = _preamble(cursor)
    metadata: dict[str, object] = {}
    for _ in range(n_keys):
        key = cursor.text("a metadata key", MAX_NAME_BYTES)
        if key in metadata:
            raise cursor.error(f"metadata key {key!r} appears twice: the file is damaged")
        metadata[key] = _value(cursor, int(cursor.number("I", f"type of {key!r}")), key)
    alignment = metadata.get("general.alignment", 32)
    if (
        not isinstance(alignment, int)
        or not 8 <= alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1) != 0
    ):
        raise cursor.error(
            f"general.alignment is {alignment!r}, must be a power of two from 8 to {MAX_ALIGNMENT}: the file is damaged"
        )
    tensors: dict[str, TensorInfo] = {}
    for _ in range(n_tensors):
        info = _tensor(cursor, alignment)
        if info.name in tensors:
            raise cursor.error(f"tensor {info.name!r} appears twice: the file is damaged")
        tensors[info.name] = info
    data_offset = -(-cursor.pos // alignment) * alignment
    _check_layout(cursor, tensors, data_offset)
    return GgufHeader(metadata, tensors, data_offset, alignment, cursor.file_bytes)


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    """Magic, version and the two counts; a record of either kind takes a known least number of bytes."""
    magic = cursor.view[: cursor.claim(4, "magic") + 4]
    if magic != b"GGUF":
        raise cursor.error(f"starts with {magic!r}, not b'GGUF': this is not a GGUF file")
    version = int(cursor.number("I", "version"))
    if version in (2 << 24, 3 << 24):
        raise cursor.error("is a big-endian GGUF file: only little-endian files are supported, convert it")
    if version not in (2, 3):
        raise cursor.error(f"has GGUF version {version}, supported are 2 and 3: convert the model again")
    n_tensors = cursor.count("tensor count", MAX_TENSORS)
    n_keys = cursor.count("metadata count", MAX_KEYS)
    least = n_tensors * 32 + n_keys * 13
    if least > cursor.file_bytes - cursor.pos:
        raise cursor.error(
            f"{n_tensors} tensors and {n_keys} metadata keys need at least {least} bytes, the file has "
            f"{cursor.file_bytes - cursor.pos} left: the file is cut short or damaged"
        )
    return n_tensors, n_keys


def _value(cursor: _Cursor, kind: int, key: str) -> object:
    what = f"value of {key!r}"
    if kind == _STRING:
        return cursor.text(what)
    if kind == _ARRAY:
        return _array(cursor, key)
    code = _SCALARS.get(kind)
    if code is None:
        raise cursor.error(f"{what} has unknown type {kind}: the file is damaged or newer than this reader")
    number = cursor.number(code, what)
    return _booleans(cursor, [number], what)[0] if kind == _BOOL else number


def _array(cursor: _Cursor, key: str) -> list[object]:
    what = f"array {key!r}"
    kind = int(cursor.number("I", f"item type of {what}"))
    n_items = cursor.count(f"item count of {what}", cursor.items_left)
    cursor.items_left -= n_items
    if kind == _STRING:
        return _strings(cursor, n_items, what)
    code = _SCALARS.get(kind)
    if code is None:
        raise cursor.error(
            f"{what} has items of type {kind}: only numbers, booleans and strings are supported"
        )
    pos = cursor.claim(n_items * struct.calcsize("<" + code), what)
    items = list(struct.unpack_from(f"<{n_items}{code}", cursor.view, pos))
    return _booleans(cursor, items, what) if kind == _BOOL else items


def _booleans(cursor: _Cursor, items: list[int | float], what: str) -> list[object]:
    if any(item not in (0, 1) for item in items):
        raise cursor.error(f"{what} is a boolean that is neither 0 nor 1: the file is damaged")
    return [item == 1 for item in items]


def _strings(cursor: _Cursor, n_items: int, what: str) -> list[object]:
    # The hot loop of a header (vocabulary and merges), so it works on locals and not through the cursor.
    view, end, pos = cursor.view, cursor.end, cursor.pos
    length_at = struct.Struct("<Q").unpack_from
    items: list[object] = []
    for _ in range(n_items):
        begin = pos + 8
        if begin > end:
            break
        pos = begin + length_at(view, pos)[0]
        if pos > end:
            break
        try:
            items.append(view[begin:pos].decode("utf-8"))
        except UnicodeDecodeError:
            cursor.decode(begin, pos, f"item {len(items)} of {what}")
    cursor.pos = min(pos, end)
    if len(items) < n_items:
        raise cursor.error(
            f"{what} has {n_items} strings, but the file or the header's limit ends at {end}, inside string {len(items)}: "
            "the file is cut short or damaged, download it again"
        )
    return items


def _tensor(cursor: _Cursor, alignment: int) -> TensorInfo:
    name = cursor.text("a tensor name", MAX_NAME_BYTES)
    n_dims = cursor.count(f"number of dimensions of {name!r}", MAX_DIMS, "I")
    dims = [int(cursor.number("Q", f"shape of {name!r}")) for _ in range(n_dims)]
    if not dims or 0 in dims:
        raise cursor.error(f"tensor {name!r} has shape {dims}, which holds nothing: the file is damaged")
    kind = int(cursor.number("I", f"type of {name!r}"))
    offset = int(cursor.number("Q", f"offset of {name!r}"))
    ggml_type = GGML_TYPES.get(kind)
    if ggml_type is None:
        raise cursor.error(
            f"tensor {name!r} has unknown type {kind}: the file is damaged or newer than this reader"
        )
    if dims[0] % ggml_type.block_items:
        raise cursor.error(
            f"tensor {name!r} has rows of {dims[0]} values, {ggml_type.name} needs a multiple of {ggml_type.block_items}: "
            "the file is damaged"
        )
    if offset % alignment:
        raise cursor.error(
            f"tensor {name!r} starts at {offset}, not at a multiple of {alignment}: the file is damaged"
        )
    n_bytes = ggml_type.block_bytes * (dims[0] // ggml_type.block_items)
    for dim in dims[1:]:
        n_bytes *= dim
    return TensorInfo(name, kind, tuple(reversed(dims)), offset, n_bytes)


def _check_layout(cursor: _Cursor, tensors: dict[str, TensorInfo], data_offset: int) -> None:
    """Every tensor inside the file, none over another."""
    room = cursor.file_bytes - data_offset
    end, before = 0, ""
    for info in sorted(tensors.values(), key=lambda info: info.offset):
        if info.offset + info.n_bytes > room:
            raise cursor.error(
                f"tensor {info.name!r} needs bytes {info.offset} to {info.offset + info.n_bytes} of the data, which has "
                f"{max(room, 0)}: the file is cut short or damaged, download it again"
            )
        if info.offset < end:
            raise cursor.error(f"tensors {before!r} and {info.name!r} overlap: the file is damaged")
        end, before = info.offset + info.n_bytes, info.name
