"""The runtime and the engine on the same kernels: the same bits, so the same ids."""

import numpy as np
import pytest
import torch

from kilat.native.runtime import Sampling
from tests.native import checkpoints, twins

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("runtime")]

PROMPTS = [[7, 3, 11, 150, 2], [5], list(range(1, 70)), [9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9]]
N = 24
SAFETENSORS = [
    ("llama", "bfloat16"),
    ("llama", "float32"),
    ("llama-tied-bias", "bfloat16"),
    ("llama3-rope", "bfloat16"),
    ("llama-yarn", "bfloat16"),
    ("llama-linear", "float32"),
    ("mistral-window", "bfloat16"),
    ("qwen2", "bfloat16"),
    ("qwen2-window", "bfloat16"),
    ("qwen3", "bfloat16"),
    ("qwen3-bias", "float32"),
]


@pytest.fixture(scope="module", params=SAFETENSORS, ids="-".join)
def pair(request, tmp_path_factory, runtime):
    """(engine, model of the runtime) of one checkpoint in one dtype."""
    name, dtype = request.param
    folder = tmp_path_factory.mktemp("checkpoint")
    checkpoints.save(name, folder, torch.float32 if dtype == "float32" else torch.bfloat16)
    with twins.native_of(folder, dtype) as native:
        yield twins.engine_of(folder, dtype), native


def test_greedy_ids_are_the_engines(pair):
    engine, native = pair
    with native.session(twins.CONTEXT) as session:
        ours = [twins.native_ids(session, prompt, N, Sampling()) for prompt in PROMPTS]
    assert ours == twins.engine_ids(engine, PROMPTS, N)


def test_sampled_ids_are_the_engines_for_the_same_seed(pair):
    engine, native = pair
    params = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": -(2**62) - 12345}
    with native.session(twins.CONTEXT) as session:
        ours = [twins.native_ids(session, prompt, N, Sampling(**params)) for prompt in PROMPTS]
    assert ours == twins.engine_ids(engine, PROMPTS, N, **params)
    assert len({tuple(ids) for ids in ours}) > 1


def test_every_layer_and_the_logits_have_the_engines_bits(pair):
    engine, native = pair
    prompt = PROMPTS[2]
    streams, logits = twins.engine_streams(engine, prompt)
    with native.session(twins.CONTEXT, keep_layers=True) as session:
        session.prefill(prompt)
        np.testing.assert_array_equal(session.layers(), streams)
        np.testing.assert_array_equal(session.logits(), logits)


FORMATS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
MIXED = {"": "Q5_0", "attn_v": "Q8_0", "ffn_down": "Q6_K", "token_embd": "Q5_1", "output.": "Q8_0"}
HALF_PLAIN = {"": "Q4_1", "attn_k": "F16", "ffn_up": "BF16", "token_embd": "F32", "output.": "F16"}
GGUF = [
    *(pytest.param("llama", {"": name}, False, id=name) for name in FORMATS),
    pytest.param("qwen2", MIXED, False, id="qwen2-mixed"),
    pytest.param("qwen3", {"": "Q4_K"}, True, id="qwen3-tied"),
    pytest.param("llama", HALF_PLAIN, False, id="half-plain"),
    pytest.param("llama", {"": "BF16"}, True, id="plain-tied"),
]


@pytest.mark.parametrize("stored", [False, True], ids=["wide", "stored"])
@pytest.mark.parametrize(("architecture", "formats", "tied"), GGUF)
def test_gguf_ids_and_logits_are_the_engines(architecture, formats, tied, stored, tmp_path):
    path = checkpoints.write_gguf(tmp_path / "tiny.gguf", architecture, formats, tied=tied)
    engine = twins.engine_of(path, "bfloat16", stored=stored)
    _, logits = twins.engine_streams(engine, PROMPTS[2])
    params = {"temperature": 0.7, "seed": 3}
    with twins.native_of(path, "bfloat16", stored=stored) as native, native.session(twins.CONTEXT) as session:
        session.prefill(PROMPTS[2])
        np.testing.assert_array_equal(session.logits(), logits)
        ours = [twins.native_ids(session, prompt, N, Sampling(**params)) for prompt in PROMPTS[:2]]
    assert ours == twins.engine_ids(engine, PROMPTS[:2], N, **params)


@pytest.mark.parametrize("threads", [1, 3])
def test_number_of_threads_changes_no_bit(threads, tmp_path):
    checkpoints.save("llama", tmp_path, torch.bfloat16)
    with twins.native_of(tmp_path, "bfloat16", threads=threads) as native, native.session() as session:
        session.prefill(PROMPTS[2])
        found = session.logits()
    with twins.native_of(tmp_path, "bfloat16") as native, native.session() as session:
        session.prefill(PROMPTS[2])
        np.testing.assert_array_equal(found, session.logits())
