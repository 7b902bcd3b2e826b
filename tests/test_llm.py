"""The offline API on a tiny random model: order, stop strings, samples, logprobs, and errors before anything runs."""

import pytest

from kilat.base.errors import RequestError
from kilat.llm import LLM
from kilat.wire.sampling import Grammar, SamplingParams
from tests.cli.whole_model import write_model

pytestmark = pytest.mark.cpu
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("tiny"))
    with LLM(str(folder), kernels="reference", threads=1, max_num_seqs=4, kv_cache_bytes=8 << 20) as model:
        yield model


def test_answers_come_in_the_order_of_the_prompts_and_equal_those_of_single_calls(llm):
    prompts = ["one", "two two", [5, 6, 7], "three"]
    finished = []
    together = llm.generate(prompts, GREEDY, on_finish=lambda i, c: finished.append(i))
    assert sorted(finished) == [0, 1, 2, 3]
    for prompt, completion in zip(prompts, together):
        alone = llm.generate(prompt, GREEDY)[0]
        assert alone.samples[0].token_ids == completion.samples[0].token_ids
        assert alone.text == completion.text
    assert together[2].prompt_ids == [5, 6, 7]


def test_each_prompt_can_have_parameters_of_its_own(llm):
    short, long = (SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (2, 9))
    lengths = [len(c.samples[0].token_ids) for c in llm.generate(["a", "b"], [short, long])]
    assert lengths == [2, 9]


def test_samples_of_a_prompt_differ_and_are_repeatable(llm):
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=8, ignore_eos=True)
    first, again = (llm.generate("abc", params)[0] for _ in range(2))
    ids = [s.token_ids for s in first.samples]
    assert ids == [s.token_ids for s in again.samples]
    assert len({tuple(i) for i in ids}) == 3
    assert [s.index for s in first.samples] == [0, 1, 2]


def test_a_stop_string_ends_the_text_before_it_and_frees_the_session(llm):
    text = llm.generate("abc", GREEDY)[0].text
    assert len(text) > 4, "the model must say something for this test"
    stop = text[2:4]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=(stop,))
    sample = llm.generate("abc", params)[0].samples[0]
    assert sample.text == text[: text.index(stop)]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
    assert not llm.engine.has_work


def test_logprobs_are_reported_for_prompt_and_answer(llm):
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    completion = llm.generate([5, 6, 7], params)[0]
    sample = completion.samples[0]
    assert [e.token_id for e in sample.logprobs] == sample.token_ids
    assert all(e.top[0][0] == e.token_id for e in sample.logprobs)
    assert completion.prompt_logprobs[0] is None
    assert [e.token_id for e in completion.prompt_logprobs[1:]] == [6, 7]


def test_a_grammar_constrains_and_a_bad_one_is_the_callers_mistake(llm):
    digits = SamplingParams(temperature=1.0, seed=1, max_tokens=20, grammar=Grammar("regex", "[0-9]{4}"))
    assert llm.generate("n", digits)[0].text.isdigit()
    with pytest.raises(RequestError, match="grammar"):
        llm.generate("n", SamplingParams(max_tokens=4, grammar=Grammar("regex", "(")))
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        (["a", "b"], [GREEDY], "2 prompts but 1"),
        (["a", 5], GREEDY, "mixed"),
        ("a", SamplingParams(temperature=-1.0), "temperature"),
        ([[10**6]], GREEDY, "token id"),
        ([[]], GREEDY, "prompt"),
    ],
)
def test_mistakes_are_told_before_anything_runs(llm, prompts, params, words):
    with pytest.raises(RequestError, match=words):
        llm.generate(prompts, params)
    assert not llm.engine.has_work
