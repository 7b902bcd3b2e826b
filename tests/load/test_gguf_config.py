"""GGUF metadata as a config: what is translated, and that nothing that changes the math is skipped."""

import pytest

from kilat.base.errors import ModelFileError
from kilat.load.config import Generation, read_config, read_generation
from kilat.load.files import ModelFiles
from tests.base.gguf_bytes import BOOL, F32, STRING, U32, Tensor, array, scalar
from tests.load.tiny_gguf import TOKENS, rope_factors, rope_tensor, tiny_gguf, with_key

pytestmark = pytest.mark.logic


@pytest.fixture
def files(tmp_path):
    """Writes a file in the making and gives it as ModelFiles."""

    def write(file):
        (tmp_path / "m.gguf").write_bytes(file.build())
        return ModelFiles("gguf", tmp_path / "m.gguf", "m")

    return write


BASE = {
    "vocab_size": 8,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 2.0**-17,
    "rope_theta": 5e5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("architecture", "extra"),
    [
        ("llama", {"attention_bias": False, "mlp_bias": False}),
        ("qwen2", {}),
        ("qwen3", {"attention_bias": False}),
    ],
)
def test_architecture_gives_its_hugging_face_config(files, architecture, extra):
    config = read_config(files(tiny_gguf(architecture)))
    assert config == {"model_type": architecture, **BASE, **extra}


def test_file_without_output_matrix_ties_it_to_the_embedding(files):
    assert read_config(files(tiny_gguf(tied=True)))["tie_word_embeddings"] is True


def test_head_dim_and_heads_have_their_usual_defaults(files):
    file = with_key(tiny_gguf(), "llama.attention.head_count_kv", None)
    file = with_key(file, "llama.rope.freq_base", None)
    config = read_config(files(file))
    assert (config["num_key_value_heads"], config["rope_theta"]) == (4, 10_000.0)


def test_head_dim_of_its_own_is_taken_from_key_length(files):
    file = with_key(tiny_gguf("qwen3"), "qwen3.attention.key_length", scalar(U32, 16))
    file = with_key(file, "qwen3.attention.value_length", scalar(U32, 16))
    assert read_config(files(file))["head_dim"] == 16


def test_biases_of_a_llama_file_show_in_the_config(files):
    file = tiny_gguf()
    file.tensors.append(Tensor("blk.0.attn_q.bias", (32,), 0, bytes(128)))
    assert read_config(files(file))["attention_bias"] is True


def test_linear_scaling_is_translated(files):
    file = with_key(tiny_gguf(), "llama.rope.scaling.type", scalar(STRING, "linear"))
    file = with_key(file, "llama.rope.scaling.factor", scalar(F32, 4.0))
    assert read_config(files(file))["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_factor_without_a_type_is_linear_scaling(files):
    file = with_key(tiny_gguf(), "llama.rope.scale_linear", scalar(F32, 2.0))
    assert read_config(files(file))["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_yarn_scaling_is_translated(files):
    file = with_key(tiny_gguf("qwen2"), "qwen2.rope.scaling.type", scalar(STRING, "yarn"))
    file = with_key(file, "qwen2.rope.scaling.factor", scalar(F32, 4.0))
    file = with_key(file, "qwen2.rope.scaling.original_context_length", scalar(U32, 128))
    assert read_config(files(file))["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }


def test_scaling_that_scales_nothing_is_left_out(files):
    file = with_key(tiny_gguf(), "llama.rope.scaling.type", scalar(STRING, "none"))
    file = with_key(file, "llama.rope.scaling.factor", scalar(F32, 8.0))
    assert "rope_scaling" not in read_config(files(file))
    file = with_key(file, "llama.rope.scaling.type", scalar(STRING, "linear"))
    file = with_key(file, "llama.rope.scaling.factor", scalar(F32, 1.0))
    assert "rope_scaling" not in read_config(files(file))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_parameters_are_found_again_from_their_divisors(files, factor):
    file = tiny_gguf()
    file.tensors.append(rope_tensor(rope_factors(factor)))
    assert read_config(files(file))["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_divisors_of_one_scale_nothing(files):
    file = tiny_gguf()
    file.tensors.append(rope_tensor([1.0] * 4))
    assert "rope_scaling" not in read_config(files(file))


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (rope_factors(8.0, context=4096), "not supported in GGUF"),
        (rope_factors(8.0, high=2.0), "not supported in GGUF"),
        ([1.0, 1.0, 2.0, 3.0], "not supported in GGUF"),
        ([1.0, 1.0, float("nan"), 8.0], "damaged"),
        ([1.0, 1.0, 1.0, float("inf")], "damaged"),
        ([0.0, 1.0, 1.0, 8.0], "damaged"),
        ([1.0, 8.0], "expected F32 of"),
    ],
)
def test_other_divisors_are_refused_and_not_guessed(files, factors, message):
    file = tiny_gguf()
    file.tensors.append(rope_tensor(factors))
    with pytest.raises(ModelFileError, match=message):
        read_config(files(file))


def test_harmless_fields_are_accepted(files):
    file = tiny_gguf()
    for key, value in {
        "llama.vocab_size": scalar(U32, 8),
        "llama.rope.dimension_count": scalar(U32, 8),
        "llama.tensor_data_layout": scalar(STRING, "Meta AI original pth"),
        "llama.expert_count": scalar(U32, 0),
        "llama.attention.sliding_window": scalar(U32, 512),
        "llama.attention.causal": scalar(BOOL, 1),
        "llama.rope.scaling.finetuned": scalar(BOOL, 1),
        "llama.some_switch_that_is_off": scalar(BOOL, 0),
        "general.name": scalar(STRING, "anything"),
        "quantize.imatrix.file": scalar(STRING, "x.dat"),
    }.items():
        with_key(file, key, value)
    assert read_config(files(file))["hidden_size"] == 32


REFUSED = {
    "unknown architecture": ("general.architecture", scalar(STRING, "mamba"), "'mamba'; supported: llama, qwen2, qwen3"),
    "architecture of another type": ("general.architecture", scalar(U32, 7), "supported: llama"),
    "no architecture": ("general.architecture", None, "None; supported: llama"),
    "adapter": ("general.type", scalar(STRING, "adapter"), "'adapter', not a model"),
    "one part of several": ("split.count", scalar(U32, 3), "one of 3 parts"),
    "missing field": ("llama.embedding_length", None, "no 'llama.embedding_length'"),
    "missing epsilon": ("llama.attention.layer_norm_rms_epsilon", None, "layer_norm_rms_epsilon"),
    "field of another type": ("llama.block_count", scalar(STRING, "2"), "expected int"),
    "boolean for a number": ("llama.block_count", scalar(BOOL, 1), "expected int"),
    "list for a number": ("llama.attention.head_count", array(U32, [4, 4]), "a list of 2, expected int"),
    "zero layers": ("llama.block_count", scalar(U32, 0), "allowed 1 to 4096"),
    "million layers": ("llama.block_count", scalar(U32, 10**6), "allowed 1 to 4096"),
    "heads that do not divide": ("llama.attention.head_count", scalar(U32, 5), "not a multiple"),
    "negative epsilon": ("llama.attention.layer_norm_rms_epsilon", scalar(F32, -1.0), "greater than 0"),
    "epsilon that is no number": ("llama.attention.layer_norm_rms_epsilon", scalar(F32, float("nan")), "greater than 0"),
    "infinite theta": ("llama.rope.freq_base", scalar(F32, float("inf")), "finite number"),
    "hidden size of another model": ("llama.embedding_length", scalar(U32, 64), "expected \\[vocabulary, 64\\]"),
    "more tokens than rows": ("tokenizer.ggml.tokens", array(STRING, ["t"] * 9), "9 tokens"),
    "mixture of experts": ("llama.expert_count", scalar(U32, 8), "expert_count is 8, only 0"),
    "partial rotation": ("llama.rope.dimension_count", scalar(U32, 4), "dimension_count is 4, only 8"),
    "values of another width": ("llama.attention.value_length", scalar(U32, 4), "value_length is 4"),
    "attention to the future": ("llama.attention.causal", scalar(BOOL, 0), "causal is False"),
    "sliding window": ("llama.attention.sliding_window", scalar(U32, 64), "sliding_window is 64"),
    "unknown scaling": ("llama.rope.scaling.type", scalar(STRING, "longrope"), "'longrope'; supported"),
    "unknown field": ("llama.attention.scale", scalar(F32, 0.25), "llama.attention.scale, which may change"),
    "softcap": ("llama.final_logit_softcapping", scalar(F32, 30.0), "final_logit_softcapping"),
}  # fmt: skip


@pytest.mark.parametrize(("key", "value", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_config_that_cannot_be_honoured_is_refused(files, key, value, message):
    file = with_key(tiny_gguf(), key, value)
    if key == "llama.rope.scaling.type":
        file = with_key(file, "llama.rope.scaling.factor", scalar(F32, 4.0))
    with pytest.raises(ModelFileError, match=message):
        read_config(files(file))


@pytest.mark.parametrize("shape", [(32,), (32, 8, 1, 2)])
def test_embedding_of_another_rank_is_refused(files, shape):
    file = tiny_gguf()
    n_bytes = 4 * 32 * (16 if len(shape) > 1 else 1)
    file.tensors = [Tensor("token_embd.weight", shape, 0, bytes(n_bytes))]
    with pytest.raises(ModelFileError, match="token_embd"):
        read_config(files(file))


def test_file_without_embedding_is_refused(files):
    file = tiny_gguf()
    file.tensors = file.tensors[1:]
    with pytest.raises(ModelFileError, match="no tensor token_embd"):
        read_config(files(file))


def test_eos_and_bos_come_from_the_metadata(files):
    assert read_generation(files(tiny_gguf())) == Generation((2,), 1, 512)


def test_file_without_special_tokens_has_none(files):
    file = tiny_gguf()
    for key in ("eos", "bos"):
        with_key(file, f"tokenizer.ggml.{key}_token_id", None)
    assert read_generation(files(file)) == Generation((), None, 512)


def test_token_that_ends_turns_of_the_template_ends_a_text(files):
    file = with_key(tiny_gguf(), "tokenizer.ggml.eos_token_id", scalar(U32, 0))
    assert read_generation(files(file)).eos_ids == (0,)
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    with_key(file, "tokenizer.chat_template", scalar(STRING, template))
    assert read_generation(files(file)).eos_ids == (0, 2)


def test_end_of_turn_and_end_of_message_ids_end_a_text(files):
    file = with_key(tiny_gguf(), "tokenizer.ggml.eot_token_id", scalar(U32, 4))
    with_key(file, "tokenizer.ggml.eom_token_id", scalar(U32, 5))
    assert read_generation(files(file)).eos_ids == (2, 4, 5)


@pytest.mark.parametrize(("padding", "ends"), [(0, (2, 0)), (3, (2,)), (2, (2,))])
def test_padding_token_ends_a_text_only_when_it_is_known_to(files, padding, ends):
    file = with_key(tiny_gguf(), "tokenizer.ggml.padding_token_id", scalar(U32, padding))
    assert read_generation(files(file)).eos_ids == ends


@pytest.mark.parametrize("value", [scalar(U32, len(TOKENS)), scalar(STRING, "2"), scalar(BOOL, 1)])
def test_special_id_outside_the_vocabulary_is_refused(files, value):
    file = with_key(tiny_gguf(), "tokenizer.ggml.eos_token_id", value)
    with pytest.raises(ModelFileError, match="eos_token_id"):
        read_generation(files(file))
