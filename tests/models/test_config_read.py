"""A config field that changes the math and is not understood is an error, never a default."""

import pytest

from kilat.base.errors import ConfigError, ModelFileError
from kilat.models.registry import READERS, read_config
from kilat.nn.rotary import Rope, inverse_frequencies
from kilat.ops import kernels
from tests.models import tiny

pytestmark = pytest.mark.cpu


def raw(name="llama", **changes):
    config = dict(tiny.configs()[name].to_dict().items())
    return {**config, **changes}


@pytest.mark.parametrize("name", tiny.configs())
def test_every_config_that_transformers_writes_is_read(name):
    config = read_config(raw(name))
    assert config.vocab_size == 199
    assert len(config.attention) == 3


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"logits_scaling": 8.0}, "logits_scaling"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "spiral"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": -5.0}}, "rope_theta"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"model_type": "mamba"}, "mamba"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change, word):
    with pytest.raises(ConfigError, match=word):
        config = read_config(raw(**change))
        inverse_frequencies(config.rope)


def test_unknown_fields_that_are_off_and_notes_are_let_through():
    noted = raw(new_switch=False, other=None, _note="x", architectures=["LlamaForCausalLM"])
    assert read_config(noted) == read_config(raw())


def test_the_old_rope_form_means_the_same_as_the_new_one():
    old = {k: v for k, v in raw("llama3-rope").items() if k != "rope_parameters"}
    scaling = {k: v for k, v in tiny.LLAMA3.items() if k != "rope_theta"}
    old_config = read_config({**old, "rope_theta": 500.0, "rope_scaling": scaling})
    assert old_config.rope == read_config(raw("llama3-rope")).rope
    legacy = {**{k: v for k, v in scaling.items() if k != "rope_type"}, "type": "llama3"}
    assert read_config({**old, "rope_theta": 500.0, "rope_scaling": legacy}).rope == old_config.rope


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_windows_follow_max_window_layers_and_layer_types(name):
    base = {k: v for k, v in raw(name).items() if k != "layer_types"}
    on = {**base, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    assert [a.window for a in read_config(on).attention] == [0, 7, 7]
    assert [a.window for a in read_config({**base, "sliding_window": 7}).attention] == [0, 0, 0]
    listed = {**on, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    assert [a.window for a in read_config(listed).attention] == [7, 0, 0]
    with pytest.raises(ConfigError, match="layer_types"):
        read_config({**on, "layer_types": ["strange"] * 3})


def test_a_missing_or_misshapen_tensor_is_named():
    model = tiny.transformers_model("llama")
    source = tiny.StateDict(model)
    build = tiny.build_of(source, kernels.reference())
    with pytest.raises(ModelFileError, match="no tensor model"):
        build.take("model.nowhere", (1,))
    with pytest.raises(ModelFileError, match=r"\[48\].*\[47\]"):
        build.take("model.norm.weight", (47,))


def test_partial_rotary_rotates_that_share_of_a_head():
    assert read_config(raw(partial_rotary_factor=0.5)).rope.dim == 6
    with pytest.raises(ConfigError, match="rotary"):
        read_config(raw(partial_rotary_factor=0.1))


def test_yarn_without_scaling_is_plain():
    plain, one = inverse_frequencies(Rope(8, 1e4, 64, {"type": "default"}))
    yarn, factor = inverse_frequencies(Rope(8, 1e4, 64, {"type": "yarn", "factor": 1.0}))
    assert one == factor == 1.0
    assert yarn.tolist() == plain.tolist()


def test_the_registry_lists_what_an_unknown_model_type_could_be():
    with pytest.raises(ConfigError) as e:
        read_config({"model_type": "gpt2"})
    assert all(name in e.value.message for name in READERS)
