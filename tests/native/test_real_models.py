"""Real weights: the runtime's ids are the engine's, greedy and sampled, with block formats kept and widened; so are kilat-native's."""

import subprocess
import time

import pytest

from kilat.cli.main import main
from kilat.llm import LLM
from kilat.load.sources import resolve
from kilat.native.runtime import NativeModel, Sampling
from kilat.wire.sampling import SamplingParams
from tests.e2e.prompts import PROMPTS
from tests.native import program, twins

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.usefixtures("runtime")]
MODELS = ["smollm2", "qwen2.5-coder-0.5b"]
N = 32


@pytest.mark.parametrize("weights", ["stored", "wide"])
@pytest.mark.parametrize("name", MODELS)
def test_ids_are_the_engines(name, weights):
    texts = PROMPTS[:4]
    greedy = SamplingParams(temperature=0.0, max_tokens=N, ignore_eos=True)
    sampled = SamplingParams(
        temperature=0.8, top_p=0.95, top_k=50, min_p=0.02, seed=77, max_tokens=N, ignore_eos=True
    )
    quant = "auto" if weights == "stored" else "none"
    with LLM(name, dtype="bfloat16", max_model_len=512, max_num_seqs=4, kernels="cpu", quant=quant) as llm:
        asked = [llm.generate(texts, p) for p in (greedy, sampled)]
    draws = (Sampling(), Sampling(0.8, 50, 0.95, 0.02, 77))
    with NativeModel(resolve(name).path, weights=weights) as model, model.session(512) as session:
        for completions, draw in zip(asked, draws):
            for text, c in zip(texts, completions):
                assert model.encode(text) == c.prompt_ids
                assert twins.native_ids(session, c.prompt_ids, N, draw) == c.samples[0].token_ids, text


def test_command_answers_from_the_chat_template(capsys):
    args = ["native", "smollm2", "--chat", "-p", "What is the capital of France? Answer in one sentence."]
    assert main([*args, "--stats"]) == 0
    out, err = capsys.readouterr()
    assert "Paris" in out and "weights" in err and "tokens/s" in err


def test_program_gives_the_librarys_text(tmp_path, capsys):
    native = program.built(tmp_path)

    def run(*args):
        return subprocess.run([str(native), *args], capture_output=True, text=True, timeout=60)

    prompt = "The three largest cities of"
    done = run(str(resolve("smollm2").path), "-p", prompt, "-n", "20")
    assert done.returncode == 0, done.stderr
    assert main(["native", "smollm2", "-p", prompt, "--max-tokens", "20"]) == 0
    assert capsys.readouterr().out == done.stdout
    wrong = run(str(tmp_path), "-p", "x")
    assert wrong.returncode == 1 and "config.json" in wrong.stderr


def test_a_first_token_costs_little_processor_time():
    """Opening, packing and touching, on all threads together; whatever else the machine does, this does not grow."""
    path = resolve("smollm2").path
    before = time.process_time()
    with NativeModel(path) as model, model.session() as session:
        session.prefill(model.encode("The capital of France is"), Sampling())
    assert time.process_time() - before < 1.0
