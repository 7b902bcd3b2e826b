"""Real files whose weights stay quantized: the same ids alone, in a batch and in chunks, and answers that make sense."""

import pytest

from kilat.cli.fit import predict
from kilat.cli.machine import read_machine
from kilat.engine.config import EngineConfig
from kilat.llm import LLM
from kilat.load.sources import resolve
from kilat.ops.cpu.kernels import available, cpu_kernels
from kilat.wire.sampling import SamplingParams
from tests.e2e.prompts import PROMPTS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
OPTIONS = {"dtype": "bfloat16", "max_model_len": 512, "prefix_cache": False}


@pytest.fixture(scope="module", params=["smollm2", "qwen2.5-coder-0.5b"])
def name(request):
    usable, why = available()
    if not usable:
        pytest.skip(why)
    return request.param


def ids_of(name, prompts, one_by_one=False, **options):
    with LLM(name, **OPTIONS, **options) as llm:
        assert "the file's blocks" in llm.engine.info.kernels
        calls = [[p] for p in prompts] if one_by_one else [prompts]
        return [c.samples[0].token_ids for call in calls for c in llm.generate(call, GREEDY)]


def test_greedy_ids_alone_in_a_batch_and_in_chunks_are_the_same(name):
    alone = ids_of(name, PROMPTS[:8], one_by_one=True, threads=1)
    assert ids_of(name, PROMPTS[:8], max_num_seqs=8) == alone
    assert ids_of(name, PROMPTS[:8], max_num_seqs=8, max_step_tokens=8) == alone


def test_a_chat_answer_names_the_capital(name):
    with LLM(name, **OPTIONS) as llm:
        answer = llm.chat(
            [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}], GREEDY
        )[0]
    assert "Paris" in answer.text


def test_prediction_of_the_weights_memory_is_within_five_percent(name):
    config = EngineConfig("", "gguf", name, dtype="bfloat16", max_model_len=512)
    fit = predict(resolve(name), config, cpu_kernels(1), read_machine())
    with LLM(name, **OPTIONS) as llm:
        kept = llm.engine.info.ledger_bytes["weights"]
    assert fit.ledger_bytes["weights"] == pytest.approx(kept, rel=0.05)
