"""Weights out of GGUF files: names, row order, formats, and files that lie."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.base.errors import ModelFileError
from kilat.load import gguf_weights
from kilat.load.config import read_config
from kilat.load.files import ModelFiles
from kilat.load.weights import open_weights
from tests.base.gguf_bytes import STRING, Tensor, scalar
from tests.load.tiny_gguf import (
    HEADS,
    KV_HEADS,
    TOKENS,
    rope_factors,
    rope_tensor,
    shapes,
    tiny_gguf,
    values,
    with_key,
)

pytestmark = pytest.mark.cpu

HF_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
HF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def hf_name(name: str) -> str:
    if name in HF_TOP:
        return HF_TOP[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{HF_LAYER[rest]}"


@pytest.fixture
def files(tmp_path):
    """Writes a file in the making (or bytes) and gives it as ModelFiles."""

    def write(file):
        path = tmp_path / "m.gguf"
        path.write_bytes(file if isinstance(file, bytes) else file.build())
        return ModelFiles("gguf", path, "m")

    return write


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_tensors_of_qwen_files_have_hugging_face_names_and_the_stored_numbers(files, architecture, tied):
    stored = {hf_name(n): values(n, s) for n, s in shapes(architecture, tied=tied).items()}
    with open_weights(files(tiny_gguf(architecture, tied=tied))) as weights:
        assert weights.shapes() == {name: content.shape for name, content in stored.items()}
        assert weights.total_bytes == sum(content.nbytes for content in stored.values())
        for name, content in stored.items():
            assert torch.equal(weights.get(name, torch.float32), torch.from_numpy(content))


def interleaved(hf: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows as a llama GGUF file stores them, one row at a time: row r of a head's halves goes to 2 r (+ 1 for the second)."""
    head_dim = hf.shape[0] // n_heads
    out = np.empty_like(hf)
    for row in range(hf.shape[0]):
        head, place = divmod(row, head_dim)
        second, r = divmod(place, head_dim // 2)
        out[head * head_dim + 2 * r + second] = hf[row]
    return out


def test_query_and_key_rows_of_llama_files_are_put_back_in_hugging_face_order(files):
    file = tiny_gguf()
    wanted = {}
    for i, tensor in enumerate(file.tensors):
        content = values(tensor.name, shapes("llama")[tensor.name])
        wanted[hf_name(tensor.name)] = content
        part = tensor.name.split(".")[-2]
        n_heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(part)
        if n_heads:
            file.tensors[i] = Tensor(tensor.name, tensor.dims, 0, interleaved(content, n_heads).tobytes())
    with open_weights(files(file)) as weights:
        for name, content in wanted.items():
            assert torch.equal(weights.get(name, torch.float32), torch.from_numpy(content)), name


def test_biases_of_llama_files_are_put_back_too(files):
    file = tiny_gguf()
    bias = np.arange(32, dtype=np.float32)
    file.tensors.append(Tensor("blk.1.attn_q.bias", (32,), 0, interleaved(bias[:, None], HEADS).tobytes()))
    with open_weights(files(file)) as weights:
        assert weights.get("model.layers.1.self_attn.q_proj.bias", torch.float32).tolist() == bias.tolist()


def test_frequency_divisors_are_given_under_their_own_name(files):
    file = tiny_gguf()
    file.tensors.append(rope_tensor(rope_factors(8.0)))
    with open_weights(files(file)) as weights:
        assert weights.get("rope_freqs.weight", torch.float32).tolist() == pytest.approx(rope_factors(8.0))


def test_tensors_are_fresh_and_contiguous(files):
    with open_weights(files(tiny_gguf())) as weights:
        for name in weights.shapes():
            first = weights.get(name, torch.float32)
            assert first.is_contiguous()
            first.zero_()
            assert weights.get(name, torch.float32).count_nonzero() > 0
        kept = weights.get("lm_head.weight", torch.float32)
    assert torch.equal(kept, torch.from_numpy(values("output.weight", (8, 32))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_numbers_are_rounded_to_the_dtype_asked_for(files, dtype):
    with open_weights(files(tiny_gguf())) as weights:
        found = weights.get("lm_head.weight", dtype)
    assert found.dtype == dtype
    assert torch.equal(found, torch.from_numpy(values("output.weight", (8, 32))).to(dtype))


@pytest.mark.parametrize("read_bytes", [34 * 3, 4 << 20])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16"])
def test_quantized_tensor_written_by_the_gguf_package_comes_back(tmp_path, kind, read_bytes, monkeypatch):
    """Also when it is read in many pieces, of which the last is short."""
    monkeypatch.setattr(gguf_weights, "_READ_BYTES", read_bytes)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-6)
    numbers = np.random.default_rng(0).standard_normal((11, 64)).astype(np.float32)
    packed = quantize(numbers, GGMLQuantizationType[kind])
    writer.add_tensor("token_embd.weight", packed, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_weights(ModelFiles("gguf", path, "m")) as weights:
        found = weights.get("model.embed_tokens.weight", torch.float32)
    if kind == "F16":
        packed = packed.view(np.uint8)
    assert torch.equal(found, torch.from_numpy(dequantize(packed, GGMLQuantizationType[kind])))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_matrices_come_in_their_blocks_with_the_rows_in_the_order_of_get(files, architecture):
    file = tiny_gguf(architecture)
    for i, tensor in enumerate(file.tensors):
        if len(tensor.dims) == 2:
            content = values(tensor.name, shapes(architecture)[tensor.name])
            file.tensors[i] = Tensor(
                tensor.name, tensor.dims, 8, quantize(content, GGMLQuantizationType.Q8_0).tobytes()
            )
    with open_weights(files(file)) as weights:
        for name, shape in weights.shapes().items():
            found = weights.get_blocks(name)
            if len(shape) == 1:
                assert found is None
                continue
            assert (
                found.shape == shape
                and found.ggml_type == 8
                and found.data.shape == (shape[0], shape[1] // 32 * 34)
            )
            read = torch.from_numpy(dequantize(found.data.numpy(), GGMLQuantizationType.Q8_0))
            assert torch.equal(read, weights.get(name, torch.float32)), name
        with pytest.raises(ModelFileError, match="no tensor for x"):
            weights.get_blocks("x")


def test_matrices_of_plain_numbers_have_no_blocks(files):
    with open_weights(files(tiny_gguf())) as weights:
        assert all(weights.get_blocks(name) is None for name in weights.shapes())


def test_tensor_that_is_not_there_is_a_model_file_error(files):
    with open_weights(files(tiny_gguf(tied=True))) as weights, pytest.raises(ModelFileError, match="lm_head"):
        weights.get("lm_head.weight", torch.float32)


@pytest.mark.parametrize(
    "name",
    ["blk.0.ffn_gate_exps.weight", "blk.01.attn_q.weight", "blk.0.attn_q.scale", "blk.-1.attn_q.weight", "x"],
)
def test_tensor_without_a_place_in_the_model_is_refused(files, name):
    file = tiny_gguf()
    file.tensors.append(Tensor(name, (8, 8), 0, bytes(256)))
    with pytest.raises(ModelFileError, match="no place in a llama model"):
        open_weights(files(file))


def test_format_that_is_not_supported_is_refused_when_the_file_is_opened(files):
    file = tiny_gguf("qwen2")
    file.tensors.append(Tensor("blk.0.attn_output.bias", (256,), 23, bytes(136)))
    with pytest.raises(ModelFileError, match="IQ4_XS; supported"):
        open_weights(files(file))


def test_rows_that_heads_cannot_share_are_refused(files):
    file = tiny_gguf()
    file.tensors.append(Tensor("blk.1.attn_q.bias", (30,), 0, bytes(120)))
    with pytest.raises(ModelFileError, match="4 heads cannot share"):
        open_weights(files(file))


def test_unknown_architecture_is_refused(files):
    with pytest.raises(ModelFileError, match="'gemma3'; supported"):
        open_weights(files(with_key(tiny_gguf(), "general.architecture", scalar(STRING, "gemma3"))))


def test_file_that_shrinks_while_it_is_open_is_an_error_and_not_a_crash(files):
    model = files(tiny_gguf())
    with open_weights(model) as weights:
        with open(model.path, "r+b") as file:
            file.truncate(model.path.stat().st_size - 4000)
        with pytest.raises(ModelFileError, match="changed while it was open"):
            for name in weights.shapes():
                weights.get(name, torch.float32)


CONTENT = tiny_gguf(tokens=TOKENS).build()
HEADER_BYTES = len(CONTENT) - sum(len(t.data) + -len(t.data) % 32 for t in tiny_gguf().tensors)


def use(model: ModelFiles) -> None:
    """What a loader does: either all of it works and fits together, or there is a ModelFileError."""
    try:
        config = read_config(model)
        with open_weights(model) as weights:
            for name, shape in weights.shapes().items():
                assert weights.get(name, torch.bfloat16).shape == shape
    except ModelFileError:
        return
    assert config["vocab_size"] * config["hidden_size"] * 4 <= len(CONTENT) + 64


@settings(max_examples=1000)
@given(
    edits=st.lists(st.tuples(st.integers(0, HEADER_BYTES), st.binary(min_size=1, max_size=9)), max_size=3),
    length=st.just(len(CONTENT)) | st.integers(0, len(CONTENT)),
)
def test_random_damage_ends_in_a_model_file_error_or_a_model(tmp_path_factory, edits, length):
    damaged = bytearray(CONTENT)
    for place, patch in edits:
        damaged[place : place + len(patch)] = patch
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged[:length])
    use(ModelFiles("gguf", path, "m"))


def test_a_flipped_bit_in_every_byte_of_the_header_ends_in_a_model_file_error_or_a_model(tmp_path):
    path = tmp_path / "damaged.gguf"
    for place in range(HEADER_BYTES):
        damaged = bytearray(CONTENT)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        use(ModelFiles("gguf", path, "m"))


def test_shapes_of_2_to_the_62_cost_no_memory(files):
    file = tiny_gguf()
    file.tensors.append(Tensor("blk.0.attn_output.bias", (2**31, 2**31), 0, b""))
    with pytest.raises(ModelFileError, match="cut short"):
        open_weights(files(file))
