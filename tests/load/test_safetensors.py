"""Weights out of safetensors directories: one file or shards, every check of the header, and damage of any kind."""

import json
import os
import struct
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kilat.base.errors import ModelFileError
from kilat.load import safetensors_header
from kilat.load.files import ModelFiles
from kilat.load.safetensors_header import read_header
from kilat.load.weights import open_weights

pytestmark = pytest.mark.cpu

TENSORS = {
    "model.embed_tokens.weight": torch.arange(24, dtype=torch.float32).view(6, 4),
    "model.norm.weight": torch.linspace(-1, 1, 4).bfloat16(),
    "model.layers.0.mlp.up_proj.weight": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).half(),
    "scale": torch.tensor(2.5),
    "nothing": torch.empty(0, 4),
}


def raw_file(header: object, data: bytes = b"", header_bytes: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if header_bytes is None else header_bytes) + text + data


def one(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.fixture
def model(tmp_path):
    """Writes files of a model directory (name -> bytes or object for JSON) and gives it as ModelFiles."""

    def write(**content):
        for name, value in content.items():
            raw = value if isinstance(value, bytes) else json.dumps(value).encode()
            (tmp_path / name.replace("__", ".")).write_bytes(raw)
        return ModelFiles("hf", tmp_path, "m")

    return write


@pytest.fixture
def saved(tmp_path):
    """A directory with TENSORS in one file, written by the library."""
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return ModelFiles("hf", tmp_path, "m")


def test_tensors_of_one_file_come_back(saved):
    with open_weights(saved) as weights:
        assert weights.shapes() == {name: tuple(t.shape) for name, t in TENSORS.items()}
        assert weights.total_bytes == sum(t.nbytes for t in TENSORS.values())
        for name, tensor in TENSORS.items():
            assert torch.equal(weights.get(name, tensor.dtype), tensor)
            assert torch.equal(weights.get(name, torch.bfloat16), tensor.bfloat16())


def test_tensors_are_fresh_contiguous_and_outlive_the_file(saved):
    with open_weights(saved) as weights:
        first = weights.get("model.embed_tokens.weight", torch.float32)
        first.zero_()
        second = weights.get("model.embed_tokens.weight", torch.float32)
    (saved.path / "model.safetensors").unlink()
    assert second.is_contiguous()
    assert torch.equal(second, TENSORS["model.embed_tokens.weight"])


def shard(directory) -> dict[str, str]:
    names = list(TENSORS)
    halves = {"a-00001.safetensors": names[:2], "a-00002.safetensors": names[2:]}
    for file, part in halves.items():
        save_file({n: TENSORS[n] for n in part}, directory / file)
    return {n: file for file, part in halves.items() for n in part}


def write_index(directory, weight_map: object) -> ModelFiles:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return ModelFiles("hf", directory, "m")


def test_shards_named_by_an_index_are_one_checkpoint(tmp_path):
    with open_weights(write_index(tmp_path, shard(tmp_path))) as weights:
        assert weights.shapes().keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert torch.equal(weights.get(name, torch.float32), tensor.float())


def test_shard_that_is_a_link_into_a_cache_is_followed(tmp_path):
    """Hub caches keep files as blobs and link to them."""
    weight_map = shard(tmp_path)
    (tmp_path / "blobs").mkdir()
    for file in set(weight_map.values()):
        os.rename(tmp_path / file, tmp_path / "blobs" / file)
        (tmp_path / file).symlink_to(tmp_path / "blobs" / file)
    with open_weights(write_index(tmp_path, weight_map)) as weights:
        assert torch.equal(weights.get("scale", torch.float32), TENSORS["scale"])


def test_shard_that_is_missing_is_named(tmp_path):
    weight_map = shard(tmp_path)
    (tmp_path / "a-00002.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"a-00002\.safetensors, which is not there"):
        open_weights(write_index(tmp_path, weight_map))


def test_tensor_that_its_shard_does_not_have_is_named(tmp_path):
    weight_map = shard(tmp_path) | {"model.norm.weight": "a-00002.safetensors"}
    with pytest.raises(ModelFileError, match=r"'model.norm.weight' in a-00002\.safetensors"):
        open_weights(write_index(tmp_path, weight_map))


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/passwd",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "pytorch_model.bin",
        ".safetensors",
        "..safetensors",
        "",
        7,
        None,
        ["x.safetensors"],
    ],
)
def test_index_that_names_anything_but_a_safetensors_file_beside_it_is_refused(tmp_path, name):
    (tmp_path.parent / "model.safetensors").write_bytes(raw_file({}))
    with pytest.raises(ModelFileError, match="not the name of a safetensors file"):
        open_weights(write_index(tmp_path, {"x": name}))


@pytest.mark.parametrize("index", [b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b"{", b"\xff"])
def test_index_without_a_map_is_refused(model, index):
    with pytest.raises(ModelFileError, match=r"model\.safetensors\.index\.json"):
        open_weights(model(model__safetensors__index__json=index))


def test_directory_with_pickled_weights_only_is_refused_with_the_reason(model):
    with pytest.raises(ModelFileError, match="can run code"):
        open_weights(model(pytorch_model__bin=b"x"))


def test_one_file_goes_before_an_index(saved):
    write_index(saved.path, {"x": "missing.safetensors"})
    with open_weights(saved) as weights:
        assert weights.shapes().keys() == TENSORS.keys()


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "I64", "F64"])
def test_format_that_is_not_supported_is_named_when_it_is_asked_for(model, dtype):
    size = {"F8_E4M3": 1, "I8": 1}.get(dtype, 8)
    with open_weights(
        model(model__safetensors=raw_file({"w": one(dtype, [2], [0, 2 * size])}, bytes(16)[: 2 * size]))
    ) as w:
        assert w.shapes() == {"w": (2,)}
        with pytest.raises(ModelFileError, match=f"stored as {dtype}; supported: F32, F16, BF16"):
            w.get("w", torch.float32)


def test_tensor_that_is_not_there_is_a_model_file_error(saved):
    with open_weights(saved) as weights, pytest.raises(ModelFileError, match=r"no tensor lm_head"):
        weights.get("lm_head.weight", torch.float32)


HOSTILE = {
    "empty": (b"", "cut short"),
    "seven bytes": (b"\0" * 7, "cut short"),
    "no header": (b"\0" * 8, "not valid JSON"),
    "header length 2^63": (struct.pack("<Q", 2**63) + b"{}", "cut short"),
    "header longer than the file": (raw_file({}, header_bytes=3), "cut short"),
    "not JSON": (raw_file(b"{]"), "not valid JSON"),
    "not UTF-8": (raw_file(b'{"\xff": 1}'), "not valid JSON"),
    "JSON array": (raw_file([]), "JSON list, expected an object"),
    "deep nesting": (raw_file(b"[" * 100_000), "not valid JSON"),
    "duplicate name": (raw_file(b'{"a":%b,"a":%b}' % ((json.dumps(one()).encode(),) * 2), bytes(8)), "appears twice"),
    "duplicate field": (raw_file(b'{"a":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}', bytes(8)), "twice"),
    "tensor that is a number": (raw_file({"a": 3}), "not described by an object"),
    "no type": (raw_file({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)), "unknown type"),
    "unknown type": (raw_file({"a": one("F31")}, bytes(8)), "unknown type 'F31'"),
    "type of another type": (raw_file({"a": one(["F32"])}, bytes(8)), "unknown type"),
    "no shape": (raw_file({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)), "valid shape"),
    "negative dimension": (raw_file({"a": one(shape=[-1, -2])}, bytes(8)), "valid shape"),
    "dimension of 2^64": (raw_file({"a": one(shape=[2**64])}, bytes(8)), "valid shape"),
    "fractional dimension": (raw_file({"a": one(shape=[2.0])}, bytes(8)), "valid shape"),
    "boolean dimension": (raw_file({"a": one(shape=[True, 2])}, bytes(8)), "valid shape"),
    "nine dimensions": (raw_file({"a": one(shape=[1] * 8 + [2])}, bytes(8)), "at most 8"),
    "NaN dimension": (raw_file(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', bytes(8)), "not valid JSON"),
    "number of 5000 digits": (raw_file(b'{"a":' + b"9" * 5000 + b"}"), "not valid JSON"),
    "shape that overflows 64 bits to 2": (raw_file({"a": one(shape=[2**62, 4, 2])}, bytes(8)), "data_offsets span 8"),
    "shape larger than its bytes": (raw_file({"a": one(shape=[3])}, bytes(8)), "needs 12 bytes, its data_offsets span 8"),
    "half a byte": (raw_file({"a": one("F4", [1], [0, 1])}, bytes(1)), "needs 0.5 bytes"),
    "offsets backwards": (raw_file({"a": one(offsets=[8, 0])}, bytes(8)), "span -8"),
    "one offset": (raw_file({"a": one(offsets=[0])}, bytes(8)), "valid data_offsets"),
    "offset past the end": (raw_file({"a": one(offsets=[0, 8])}, bytes(7)), "cut short"),
    "offset 2^62": (raw_file({"a": one(offsets=[2**62, 2**62 + 8])}, bytes(8)), "hole"),
    "overlap": (raw_file({"a": one(), "b": one(offsets=[4, 12])}, bytes(12)), "overlaps 'a'"),
    "same place": (raw_file({"a": one(), "b": one()}, bytes(8)), "overlaps 'a'"),
    "hole": (raw_file({"a": one(), "b": one(offsets=[12, 20])}, bytes(20)), "hole after 'a'"),
    "bytes of nobody": (raw_file({"a": one()}, bytes(9)), "belong to no tensor"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_file_is_refused_with_a_reason(model, content, message):
    with pytest.raises(ModelFileError, match=message):
        open_weights(model(model__safetensors=content))


def test_header_over_the_limit_is_refused_before_it_is_read(model, monkeypatch):
    monkeypatch.setattr(safetensors_header, "MAX_JSON_BYTES", 100)
    with pytest.raises(ModelFileError, match="limit 100"):
        open_weights(model(model__safetensors=raw_file({"a" * 200: one()}, bytes(8))))


def test_header_of_a_million_lists_is_refused_quickly(model):
    began = time.process_time()
    with pytest.raises(ModelFileError, match="limit 1048576"):
        open_weights(model(model__safetensors=raw_file(b"[]," * 1_000_000)))
    assert time.process_time() - began < 2


def test_error_names_the_file_but_not_its_folder(model):
    found = model(model__safetensors=b"x" * 100)
    with pytest.raises(ModelFileError) as caught:
        open_weights(found)
    assert "model.safetensors" in caught.value.message
    assert str(found.path) not in caught.value.message


def small_file(directory) -> bytes:
    save_file(TENSORS, directory / "model.safetensors")
    return (directory / "model.safetensors").read_bytes()


def use(model: ModelFiles) -> None:
    """What a loader does: it works and fits together, or there is a ModelFileError."""
    try:
        with open_weights(model) as weights:
            for name, shape in weights.shapes().items():
                assert weights.get(name, torch.float32).shape == shape
    except ModelFileError:
        return
    assert weights.total_bytes < 1 << 20


def test_every_truncation_is_refused(tmp_path):
    content = small_file(tmp_path)
    path = tmp_path / "model.safetensors"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ModelFileError):
            read_header(path)
        if length % 16 == 0:
            with pytest.raises(ModelFileError):
                open_weights(ModelFiles("hf", tmp_path, "m"))


def test_every_changed_byte_ends_in_a_model_file_error_or_a_checkpoint(tmp_path):
    content = small_file(tmp_path)
    path = tmp_path / "model.safetensors"
    for place in range(8 + int.from_bytes(content[:8], "little")):
        for value in (content[place] ^ 1, ord("9"), ord('"'), ord(",")):
            damaged = bytearray(content)
            damaged[place] = value
            path.write_bytes(damaged)
            use(ModelFiles("hf", tmp_path, "m"))


JSON_BITS = st.sampled_from(
    [b'"', b"{", b"}", b"[", b"]", b",", b":", b"-", b"0", b"99999", b"1e3", b"null", b"F8_E4M3"]
)


@settings(max_examples=800)
@given(
    edits=st.lists(st.tuples(st.integers(0, 600), JSON_BITS | st.binary(min_size=1, max_size=8)), max_size=3),
    cut=st.integers(0, 40),
)
def test_random_damage_ends_in_a_model_file_error_or_a_checkpoint(tmp_path_factory, edits, cut):
    directory = tmp_path_factory.getbasetemp() / "damaged"
    directory.mkdir(exist_ok=True)
    damaged = bytearray(small_file(directory))
    for place, patch in edits:
        damaged[place : place + len(patch)] = patch
    (directory / "model.safetensors").write_bytes(damaged[: len(damaged) - cut])
    use(ModelFiles("hf", directory, "m"))


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=30).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.lists(st.integers(0, 5), max_size=3),
            st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_checkpoint_of_the_library_survives_a_round_trip(tmp_path_factory, wanted):
    directory = tmp_path_factory.getbasetemp() / "round"
    directory.mkdir(exist_ok=True)
    tensors = {name: torch.randn(shape).to(dtype) for name, (shape, dtype) in wanted.items()}
    save_file(tensors, directory / "model.safetensors")
    with open_weights(ModelFiles("hf", directory, "m")) as weights:
        assert weights.shapes() == {name: tuple(t.shape) for name, t in tensors.items()}
        for name, tensor in tensors.items():
            assert torch.equal(weights.get(name, tensor.dtype), tensor)
