"""Real weights are read as transformers reads them. Skipped where the model is not in the cache: the test downloads nothing."""

import pytest
import torch
import transformers

from kilat.base.env import cache_dir
from kilat.load.config import Generation, read_config, read_generation
from kilat.load.files import ModelFiles
from kilat.load.weights import open_weights

pytestmark = pytest.mark.e2e


def cached(name: str) -> ModelFiles:
    path = cache_dir() / "models" / f"{name}.gguf"
    if not path.is_file():
        pytest.skip(f"{name} is not in the cache: kilat model pull {name}")
    return ModelFiles("gguf", path, name)


def test_smollm2_has_the_weights_and_config_that_transformers_reads_from_the_file():
    model = cached("smollm2")
    twin = transformers.AutoModelForCausalLM.from_pretrained(
        model.path.parent,
        gguf_file=model.path.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    theirs = twin.state_dict()
    with open_weights(model) as weights:
        assert theirs.keys() - weights.shapes().keys() == {"lm_head.weight"}  # tied
        for name in weights.shapes():
            assert torch.equal(weights.get(name, torch.float32), theirs[name]), name
    config = read_config(model)
    rope = {"rope_theta": twin.config.rope_parameters["rope_theta"]}
    assert config == {**{key: getattr(twin.config, key, None) for key in config}, **rope}


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("smollm2", Generation((2,), 1, 8192)),
        ("qwen2.5-coder-0.5b", Generation((151645, 151643), 151643, 32768)),
        ("qwen2.5-coder-1.5b", Generation((151645, 151643), 151643, 32768)),
    ],
)
def test_texts_of_real_models_end_where_their_model_cards_say(name, generation):
    assert read_generation(cached(name)) == generation


def test_matrix_that_a_file_stores_twice_is_kept_as_stored():
    """This file has the embedding as Q5_0 and the output matrix as Q8_0, which are not equal."""
    with open_weights(cached("qwen2.5-coder-0.5b")) as weights:
        embedding = weights.get("model.embed_tokens.weight", torch.bfloat16)[:64].float()
        output = weights.get("lm_head.weight", torch.bfloat16)[:64].float()
    difference = (embedding - output).norm() / output.norm()
    assert 0 < difference < 0.1
