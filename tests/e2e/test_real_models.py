"""Real weights: greedy ids equal transformers' in fp32, chat answers make sense, and nothing about load changes an id."""

import pytest
import torch
import transformers as hf

from kilat.llm import LLM
from kilat.load.sources import resolve
from kilat.wire.sampling import SamplingParams
from tests.e2e.prompts import PROMPTS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
MODELS = ["smollm2", "qwen2.5-coder-0.5b"]


@pytest.fixture(scope="module", params=MODELS)
def llm(request):
    with LLM(request.param, dtype="float32", max_model_len=512, max_num_seqs=20) as model:
        model.name = request.param
        yield model


def transformers_twin(name):
    """The same file, read and de-quantized by transformers."""
    path = resolve(name).path
    unpacked = hf.GgufConfig(dequantize=True)
    return hf.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=unpacked
    ).eval()


def test_greedy_ids_equal_transformers_over_64_tokens(llm):
    """transformers is asked what it would take after every prefix of our output: by induction that is its own greedy output."""
    twin = transformers_twin(llm.name)
    for completion in llm.generate(PROMPTS, GREEDY):
        ours = completion.samples[0].token_ids
        assert len(ours) == 64
        with torch.no_grad():
            logits = twin(torch.tensor([completion.prompt_ids + ours])).logits[0]
        theirs = logits[len(completion.prompt_ids) - 1 : -1].argmax(-1).tolist()
        assert ours == theirs, (
            f"after {PROMPTS[0]!r}: first difference at {next(i for i in range(64) if ours[i] != theirs[i])}"
        )


def test_ids_alone_equal_ids_in_a_batch_and_after_a_prefix_hit(llm):
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=24, ignore_eos=True)
    together = [c.samples[0].token_ids for c in llm.generate(PROMPTS[:8], params)]
    again = llm.generate(PROMPTS[:8], params)
    assert [c.samples[0].token_ids for c in again] == together
    for prompt, ids in zip(PROMPTS[:8], together):
        assert llm.generate(prompt, params)[0].samples[0].token_ids == ids


def test_a_chat_answer_names_the_capital(llm):
    answer = llm.chat(
        [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}], GREEDY
    )[0]
    assert "Paris" in answer.text
