"""Models whose matrices stay in GGUF's blocks: the same tokens in any company, and what the engine says of them."""

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from kilat.engine.build import build_engine
from kilat.engine.config import EngineConfig
from kilat.ops.cpu.kernels import available
from tests.base.gguf_bytes import Tensor
from tests.engine.harness import record, run
from tests.load.tiny_gguf import shapes, tiny_gguf, values

pytestmark = pytest.mark.cpu
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"t{i}" for i in range(61))]


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def path(request, tmp_path_factory):
    """A file with matrices in several formats; a layer's fused ones differ, and one of them is not in blocks."""
    usable, why = available()
    if not usable:
        pytest.skip(why)
    file = tiny_gguf(request.param, tied=True, tokens=TOKENS)
    formats = {
        "attn_q": 2,
        "attn_k": 8,
        "attn_v": 6,
        "attn_output": 3,
        "ffn_gate": 7,
        "ffn_up": 2,
        "ffn_down": 8,
    }
    for i, tensor in enumerate(file.tensors):
        name, shape = tensor.name, shapes(request.param, tied=True)[tensor.name]
        if name == "token_embd.weight":
            shape = (len(TOKENS), shape[1])
        if len(shape) == 2 and name != "blk.1.ffn_gate.weight":
            ggml_type = 8 if name == "token_embd.weight" else formats[name.split(".")[2]]
            raw = quantize(values(name, shape) * 0.3, GGMLQuantizationType(ggml_type)).tobytes()
            file.tensors[i] = Tensor(name, tuple(reversed(shape)), ggml_type, raw)
    where = tmp_path_factory.mktemp(request.param) / "m.gguf"
    where.write_bytes(file.build())
    return where


def engine_of(path, **options):
    settings = {
        "dtype": "bfloat16",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "threads": 2,
        "prefix_cache": False,
    }
    return build_engine(EngineConfig(str(path), "gguf", "tiny", **{**settings, **options}))


def jobs(n: int) -> list:
    return [
        record(
            f"s{i}",
            [(i * 7 + j * 5) % 64 for j in range(1 + 13 * (i % 3))],
            max_tokens=16,
            ignore_eos=True,
            temperature=0.0 if i % 2 else 0.9,
            seed=i,
        )
        for i in range(n)
    ]


def test_alone_batched_and_chunked_give_the_same_tokens(path):
    alone = {}
    engine = engine_of(path, max_num_seqs=1, threads=1)
    for job in jobs(8):
        alone |= run(engine, [job])
    engine.close()
    for options in ({}, {"max_step_tokens": 9}, {"page_tokens": 4, "prefix_cache": True}):
        engine = engine_of(path, **options)
        assert run(engine, jobs(8)) == alone
        engine.close()


def test_the_engine_says_that_blocks_are_kept_and_counts_fewer_bytes(path):
    kept, plain = engine_of(path), engine_of(path, quant="none")
    assert "the file's blocks" in kept.info.kernels and "blocks" not in plain.info.kernels
    assert kept.info.ledger_bytes["weights"] < plain.info.ledger_bytes["weights"]
    kept.close()
    plain.close()


def test_fp32_and_the_reference_set_dequantize(path):
    for options in ({"dtype": "float32"}, {"kernels": "reference"}):
        engine = engine_of(path, **options)
        assert "blocks" not in engine.info.kernels
        assert run(engine, jobs(1))
        engine.close()


def test_hidden_states_stay_near_those_of_dequantized_weights(path):
    """Log-probabilities of a prompt: 8-bit rows cost little beside the formats themselves."""
    found = []
    for quant in ("auto", "none"):
        engine = engine_of(path, quant=quant)
        engine.submit(record("s", [(j * 5) % 64 for j in range(60)], max_tokens=1, prompt_logprobs=0))
        events = []
        while engine.has_work:
            events += engine.step()
        found.append(torch.tensor([t.logprob for t in events[0].prompt_logprobs[1:]]))
        engine.close()
    assert (found[0] - found[1]).abs().mean() < 0.1
    assert not torch.equal(found[0], found[1])
