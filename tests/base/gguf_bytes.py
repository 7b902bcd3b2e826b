"""Builds GGUF files byte by byte, so that tests can say anything in them, also what no writer would write."""

import struct
from dataclasses import dataclass, field

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B"}
_FORMATS |= {U64: "Q", I64: "q", F64: "d"}


def text(value: str | bytes) -> bytes:
    """A string: its length in bytes, then its bytes."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def item(kind: int, value: object) -> bytes:
    """One value without its type."""
    return text(value) if kind == STRING else struct.pack("<" + _FORMATS[kind], value)


def scalar(kind: int, value: object) -> bytes:
    """A value with its type in front."""
    return struct.pack("<I", kind) + item(kind, value)


def array(kind: int, values: list, count: int | None = None) -> bytes:
    """An array; ``count`` lets it claim another length than it has."""
    head = struct.pack("<IIQ", ARRAY, kind, len(values) if count is None else count)
    return head + b"".join(item(kind, value) for value in values)


@dataclass
class Tensor:
    """``dims`` in file order (row length first). ``offset`` None: right behind the tensor before, aligned."""

    name: str | bytes
    dims: tuple[int, ...]
    kind: int
    data: bytes
    offset: int | None = None


@dataclass
class GgufBytes:
    """A file in the making; ``counts`` overrides (tensor count, key count)."""

    keys: list[tuple[str | bytes, bytes]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    version: int = 3
    magic: bytes = b"GGUF"
    alignment: int = 32
    counts: tuple[int, int] | None = None

    def build(self) -> bytes:
        n_tensors, n_keys = self.counts or (len(self.tensors), len(self.keys))
        out = self.magic + struct.pack("<IQQ", self.version, n_tensors, n_keys)
        for key, value in self.keys:
            out += text(key) + value
        data = b""
        for tensor in self.tensors:
            offset = len(data) if tensor.offset is None else tensor.offset
            out += text(tensor.name) + struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
            out += struct.pack("<IQ", tensor.kind, offset)
            if tensor.offset is None:
                data += tensor.data + b"\0" * (-len(tensor.data) % self.alignment)
        return out + b"\0" * (-len(out) % self.alignment) + data
