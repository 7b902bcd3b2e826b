"""The GGUF header reader: what a right file says, and that a wrong one costs an error and nothing else."""

import struct
import time
import tracemalloc

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.base import gguf_header
from kilat.base.errors import ModelFileError
from kilat.base.gguf_header import GGML_TYPES, TensorInfo
from tests.base.gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    GgufBytes,
    Tensor,
    array,
    scalar,
    text,
)

pytestmark = pytest.mark.logic


def small_file() -> GgufBytes:
    """A file with every kind of value and tensors of three formats."""
    keys = [
        ("general.architecture", scalar(STRING, "llama")),
        ("u8", scalar(U8, 255)),
        ("i8", scalar(I8, -128)),
        ("u16", scalar(U16, 65535)),
        ("i16", scalar(I16, -2)),
        ("u32", scalar(U32, 2**32 - 1)),
        ("i32", scalar(I32, -3)),
        ("u64", scalar(U64, 2**64 - 1)),
        ("i64", scalar(I64, -(2**63))),
        ("f32", scalar(F32, 0.5)),
        ("f64", scalar(F64, 1e300)),
        ("yes", scalar(BOOL, 1)),
        ("no", scalar(BOOL, 0)),
        ("words", array(STRING, ["", "kilat", "petir ⚡"])),
        ("numbers", array(I32, [1, -2, 3])),
        ("flags", array(BOOL, [1, 0, 1])),
        ("nothing", array(F32, [])),
    ]
    tensors = [
        Tensor("a", (2, 3), 0, struct.pack("<6f", *range(6))),
        Tensor("b", (64,), 8, bytes(range(68))),
        Tensor("c", (256, 2), 12, b"\1" * 288),
    ]
    return GgufBytes(keys, tensors)


@pytest.fixture
def read(tmp_path):
    """Reads bytes or a :class:`GgufBytes` as a file."""

    def read_bytes(content):
        path = tmp_path / "model.gguf"
        path.write_bytes(content.build() if isinstance(content, GgufBytes) else content)
        return gguf_header.read(path)

    return read_bytes


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_of_every_type_is_read(read, version):
    file = small_file()
    file.version = version
    assert read(file).metadata == {
        "general.architecture": "llama",
        "u8": 255,
        "i8": -128,
        "u16": 65535,
        "i16": -2,
        "u32": 2**32 - 1,
        "i32": -3,
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f32": 0.5,
        "f64": 1e300,
        "yes": True,
        "no": False,
        "words": ["", "kilat", "petir ⚡"],
        "numbers": [1, -2, 3],
        "flags": [True, False, True],
        "nothing": [],
    }


def test_booleans_are_booleans_and_not_numbers(read):
    metadata = read(small_file()).metadata
    assert metadata["yes"] is True and metadata["no"] is False
    assert all(type(flag) is bool for flag in metadata["flags"])


def test_tensor_table_gives_rows_first_and_places_in_the_data(read):
    header = read(small_file())
    assert list(header.tensors.values()) == [
        TensorInfo("a", 0, (3, 2), 0, 24),
        TensorInfo("b", 8, (64,), 32, 68),
        TensorInfo("c", 12, (2, 256), 128, 288),
    ]
    content = small_file().build()
    assert header.file_bytes == len(content)
    assert header.data_offset % 32 == 0
    begin = header.data_offset + 32
    assert content[begin : begin + 68] == bytes(range(68))


def test_alignment_key_moves_the_data(read):
    file = small_file()
    file.alignment = 256
    file.keys.append(("general.alignment", scalar(U32, 256)))
    header = read(file)
    assert header.alignment == 256
    assert header.data_offset % 256 == 0
    assert header.tensors["b"].offset == 256


def test_file_without_keys_and_tensors_is_valid(read):
    header = read(GgufBytes())
    assert (header.metadata, header.tensors, header.data_offset) == ({}, {}, 32)


def test_last_tensor_needs_no_padding(read):
    content = small_file().build()
    assert set(read(content[: len(content) - (-288 % 32)]).tensors) == {"a", "b", "c"}


def test_table_of_formats_is_that_of_the_gguf_package():
    package = {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    ours = {kind: tuple(entry) for kind, entry in GGML_TYPES.items()}
    shared = package.keys() & ours.keys()
    assert len(shared) >= 28
    assert {k: ours[k] for k in shared} == {k: package[k] for k in shared}


def test_file_of_the_gguf_package_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(2)
    writer.add_rope_freq_base(1e6)
    writer.add_token_list(["a", "b", "ü"])
    writer.add_custom_alignment(64)
    first = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("first.weight", first)
    writer.add_tensor("second.weight", np.ones((2, 2, 5), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = gguf_header.read(path)
    assert header.metadata["general.architecture"] == "qwen2"
    assert header.metadata["qwen2.block_count"] == 2
    assert header.metadata["qwen2.rope.freq_base"] == 1e6
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "b", "ü"]
    assert {name: info.shape for name, info in header.tensors.items()} == {
        "first.weight": (3, 4),
        "second.weight": (2, 2, 5),
    }
    theirs = {t.name: (t.data_offset, t.n_bytes) for t in gguf.GGUFReader(path).tensors}
    ours = {i.name: (header.data_offset + i.offset, i.n_bytes) for i in header.tensors.values()}
    assert ours == theirs


def hostile_key(key: str | bytes, value: bytes) -> GgufBytes:
    return GgufBytes([(key, value)])


def hostile_tensor(*tensors: Tensor) -> GgufBytes:
    return GgufBytes(tensors=list(tensors))


ROW = struct.pack("<8f", *range(8))
HOSTILE = {
    "empty": (b"", "at least 24"),
    "only a magic": (b"GGUF", "at least 24"),
    "other file": (GgufBytes(magic=b"PK\3\4"), "not a GGUF file"),
    "old version": (GgufBytes(version=1), "version 1"),
    "future version": (GgufBytes(version=4), "version 4"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "huge tensor count": (GgufBytes(counts=(2**63, 0)), "tensor count"),
    "huge key count": (GgufBytes(counts=(0, 2**64 - 1)), "metadata count"),
    "more tensors than bytes": (GgufBytes(counts=(100_000, 0)), "at least 3200000 bytes"),
    "more keys than bytes": (GgufBytes(counts=(0, 60_000)), "at least 780000 bytes"),
    "key length 2^63": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + b"\0" * 64, "length of a metadata key"),
    "key too long": (hostile_key("k" * 2000, scalar(U8, 1)), "length of a metadata key"),
    "key not UTF-8": (hostile_key(b"\xff\xfe", scalar(U8, 1)), "not UTF-8"),
    "duplicate key": (GgufBytes([("k", scalar(U8, 1)), ("k", scalar(U8, 1))]), "appears twice"),
    "unknown value type": (hostile_key("k", struct.pack("<I", 13) + b"\0" * 8), "unknown type 13"),
    "string length 2^63": (hostile_key("k", struct.pack("<IQ", STRING, 2**63) + b"abc"), "length of value"),
    "string past the end": (hostile_key("k", struct.pack("<IQ", STRING, 999) + b"abc"), "file ends"),
    "string not UTF-8": (hostile_key("k", scalar(STRING, b"\xc3\x28")), "not UTF-8"),
    "boolean of 2": (hostile_key("k", scalar(BOOL, 2)), "neither 0 nor 1"),
    "array of 2^40 numbers": (hostile_key("k", array(U8, [1, 2], count=2**40)), "item count"),
    "array of 2^40 strings": (hostile_key("k", array(STRING, ["a"], count=2**40)), "item count"),
    "array past the end": (hostile_key("k", array(U64, [1], count=1000)), "file ends"),
    "string array past the end": (hostile_key("k", array(STRING, ["a"], count=1000)), "inside string"),
    "string in array past the end": (hostile_key("k", array(STRING, [], count=1) + struct.pack("<Q", 2**63)), "inside string"),
    "string in array not UTF-8": (hostile_key("k", array(STRING, ["a", b"\x80"])), "item 1"),
    "array of arrays": (hostile_key("k", struct.pack("<IIQ", ARRAY, ARRAY, 1)), "only numbers"),
    "array of booleans of 3": (hostile_key("k", array(BOOL, [0, 3])), "neither 0 nor 1"),
    "alignment 0": (hostile_key("general.alignment", scalar(U32, 0)), "general.alignment is 0"),
    "alignment 24": (hostile_key("general.alignment", scalar(U32, 24)), "power of two"),
    "alignment 2^31": (hostile_key("general.alignment", scalar(U32, 2**31)), "power of two"),
    "alignment in words": (hostile_key("general.alignment", scalar(STRING, "32")), "power of two"),
    "tensor name not UTF-8": (hostile_tensor(Tensor(b"\xff", (8,), 0, ROW)), "not UTF-8"),
    "tensor name too long": (hostile_tensor(Tensor("n" * 1025, (8,), 0, ROW)), "length of a tensor name"),
    "duplicate tensor": (hostile_tensor(Tensor("t", (8,), 0, ROW), Tensor("t", (8,), 0, ROW)), "appears twice"),
    "no dimensions": (hostile_tensor(Tensor("t", (), 0, ROW)), "holds nothing"),
    "five dimensions": (hostile_tensor(Tensor("t", (1, 1, 1, 1, 8), 0, ROW)), "number of dimensions"),
    "empty dimension": (hostile_tensor(Tensor("t", (8, 0), 0, ROW)), "holds nothing"),
    "2^63 rows": (hostile_tensor(Tensor("t", (8, 2**63), 0, ROW)), "cut short"),
    "shape that overflows 64 bits to 0": (hostile_tensor(Tensor("t", (2**32, 2**32), 0, ROW)), "cut short"),
    "shape larger than the data": (hostile_tensor(Tensor("t", (9,), 0, ROW)), "cut short"),
    "unknown format": (hostile_tensor(Tensor("t", (8,), 99, ROW)), "unknown type 99"),
    "removed format": (hostile_tensor(Tensor("t", (32,), 4, ROW)), "unknown type 4"),
    "row that is no whole block": (hostile_tensor(Tensor("t", (33,), 8, b"\0" * 68)), "multiple of 32"),
    "offset past the end": (hostile_tensor(Tensor("t", (8,), 0, ROW, offset=64)), "cut short"),
    "offset 2^64 - 32": (hostile_tensor(Tensor("t", (8,), 0, ROW, offset=2**64 - 32)), "cut short"),
    "offset not aligned": (hostile_tensor(Tensor("t", (8,), 0, ROW, offset=4)), "multiple of 32"),
    "overlap": (hostile_tensor(Tensor("s", (16,), 0, ROW * 2), Tensor("t", (8,), 0, ROW, offset=32)), "overlap"),
    "same place": (hostile_tensor(Tensor("s", (8,), 0, ROW), Tensor("t", (8,), 0, ROW, offset=0)), "overlap"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_file_is_refused_with_a_reason(read, content, message):
    with pytest.raises(ModelFileError, match=message):
        read(content)


def test_error_names_the_file_but_not_its_folder(tmp_path):
    path = tmp_path / "secret-folder" / "m.gguf"
    path.parent.mkdir()
    path.write_bytes(b"x" * 100)
    with pytest.raises(ModelFileError) as caught:
        gguf_header.read(path)
    assert "m.gguf" in caught.value.message and "secret-folder" not in caught.value.message


@pytest.mark.parametrize("name", ["missing.gguf", "."])
def test_file_that_cannot_be_opened_is_a_model_file_error(tmp_path, name):
    with pytest.raises(ModelFileError, match="cannot read"):
        gguf_header.read(tmp_path / name)


def test_number_of_array_items_is_limited_over_all_arrays(read, monkeypatch):
    monkeypatch.setattr(gguf_header, "MAX_ARRAY_ITEMS", 10)
    halves = GgufBytes([("a", array(U8, [0] * 5)), ("b", array(U8, [0] * 5))])
    assert len(read(halves).metadata) == 2
    halves.keys.append(("c", array(U8, [0])))
    with pytest.raises(ModelFileError, match="item count"):
        read(halves)


def test_header_that_goes_on_past_its_limit_is_refused(read, monkeypatch):
    file = hostile_key("k", scalar(STRING, "x" * 1000))
    assert len(read(file).metadata["k"]) == 1000
    monkeypatch.setattr(gguf_header, "MAX_HEADER_BYTES", 500)
    with pytest.raises(ModelFileError, match="limit"):
        read(file)


def test_claims_of_a_hostile_file_allocate_nothing(read):
    claims = [content for content, _ in HOSTILE.values()]
    tracemalloc.start()
    try:
        for content in claims:
            with pytest.raises(ModelFileError):
                read(content)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_large_file_of_tiny_strings_is_read_or_refused_quickly(read):
    many = 1_000_000
    content = hostile_key("k", array(STRING, [], count=many) + text("") * many).build()
    began = time.process_time()
    header = read(content)
    assert len(header.metadata["k"]) == many
    assert time.process_time() - began < 5


def test_every_truncation_is_refused_or_loses_only_padding(read):
    content = small_file().build()
    whole = read(content)
    padding = -288 % 32
    for length in range(len(content) - padding):
        with pytest.raises(ModelFileError):
            read(content[:length])
    assert read(content[: len(content) - padding]).tensors == whole.tensors


@pytest.mark.parametrize("change", [lambda b: 0, lambda b: 255, lambda b: b ^ 1, lambda b: b ^ 128])
def test_every_changed_byte_is_refused_or_gives_a_header_inside_the_file(read, change):
    content = small_file().build()
    for place in range(read(content).data_offset):
        damaged = bytearray(content)
        damaged[place] = change(damaged[place])
        check_read(read, bytes(damaged))


def check_read(read, content: bytes) -> None:
    """Reading gives a ModelFileError, or a header whose every tensor lies inside the file without overlap."""
    try:
        header = read(content)
    except ModelFileError:
        return
    end = 0
    for info in sorted(header.tensors.values(), key=lambda info: info.offset):
        assert end <= info.offset
        end = info.offset + info.n_bytes
        size = GGML_TYPES[info.ggml_type]
        assert info.n_bytes * size.block_items == int(np.prod(info.shape)) * size.block_bytes
    assert header.tensors == {} or header.data_offset + end <= len(content)


CONTENT = small_file().build()
EDITS = st.lists(st.tuples(st.integers(0, len(CONTENT) - 1), st.binary(min_size=1, max_size=9)), max_size=4)


@settings(max_examples=500)
@given(edits=EDITS, length=st.integers(0, len(CONTENT)) | st.just(len(CONTENT)), tail=st.binary(max_size=40))
def test_random_damage_is_refused_or_gives_a_header_inside_the_file(tmp_path_factory, edits, length, tail):
    damaged = bytearray(CONTENT)
    for place, patch in edits:
        damaged[place : place + len(patch)] = patch
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"

    def read_bytes(content: bytes):
        path.write_bytes(content)
        return gguf_header.read(path)

    check_read(read_bytes, bytes(damaged[:length]) + tail)


@given(
    st.dictionaries(
        st.text(max_size=20),
        st.one_of(
            st.text(max_size=40),
            st.booleans(),
            st.integers(-(2**63), 2**63 - 1),
            st.floats(allow_nan=False),
            st.lists(st.text(max_size=10), max_size=5),
        ),
        max_size=8,
    )
)
def test_metadata_survives_a_round_trip(tmp_path_factory, metadata):
    def encode(value):
        if isinstance(value, list):
            return array(STRING, value)
        kinds = {str: STRING, bool: BOOL, int: I64, float: F64}
        return scalar(kinds[type(value)], value)

    path = tmp_path_factory.getbasetemp() / "round.gguf"
    path.write_bytes(GgufBytes([(key, encode(value)) for key, value in metadata.items()]).build())
    metadata.pop("general.alignment", None)
    assert gguf_header.read(path).metadata == metadata
