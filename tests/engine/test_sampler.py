"""Penalties, bias, minimum length, grammars and log-probabilities, each against a sentence of its definition."""

import pytest
import torch

from kilat.engine.sampler import Sampler
from kilat.ops import kernels
from kilat.policy.sched.plan import Admitted, Row
from kilat.wire.sampling import SamplingParams

pytestmark = pytest.mark.cpu
VOCAB = 10
EOS = 9


def sample(logits, prompt=(1, 2), output=(), start=None, **params):
    """Result of one row with these logits."""
    sampler = Sampler(kernels.reference(), (EOS,))
    p = SamplingParams(**{"temperature": 0.0, "seed": 1, **params})
    sampler.admit(Admitted("s", [*prompt, *output], len(prompt), p, 1), None)
    row = Row("s", len(prompt) + len(output) - 1 if start is None else start, [0], [0], sample=True)
    return sampler.sample([row], torch.tensor([logits], dtype=torch.float32))


def ramp(**changes) -> list[float]:
    """Logits 0, 0.1, 0.2 ... with some replaced: ``i3=5.0``."""
    logits = [i / 10 for i in range(VOCAB)]
    for name, value in changes.items():
        logits[int(name[1:])] = value
    return logits


def test_greedy_takes_the_largest():
    assert sample(ramp(i4=7.0)).token_ids == [[4]]


def test_repetition_penalty_covers_prompt_and_output_and_both_signs():
    assert sample(ramp(i2=2.0, i3=1.5), repetition_penalty=1.5).token_ids == [[3]]
    assert sample(ramp(i5=2.0, i3=1.5), output=(5,), repetition_penalty=1.5).token_ids == [[3]]
    negative = [-1.0, -1.0 - 0.4, *[-9.0] * 8]
    assert sample(negative, prompt=(0,), repetition_penalty=1.5).token_ids == [[1]]


def test_presence_penalty_counts_once_and_only_output():
    assert sample(ramp(i2=2.0, i3=1.5), presence_penalty=1.0).token_ids == [[2]]
    assert sample(ramp(i5=2.0, i3=1.5), output=(5, 5, 5), presence_penalty=0.6).token_ids == [[3]]
    assert sample(ramp(i5=2.0, i3=1.5), output=(5, 5, 5), presence_penalty=0.4).token_ids == [[5]]


def test_frequency_penalty_counts_every_occurrence():
    assert sample(ramp(i5=2.0, i3=1.5), output=(5, 5, 5), frequency_penalty=0.2).token_ids == [[3]]
    assert sample(ramp(i5=2.0, i3=1.5), output=(5,), frequency_penalty=0.2).token_ids == [[5]]


def test_penalties_hear_of_tokens_sampled_since_admission():
    sampler = Sampler(kernels.reference(), (EOS,))
    p = SamplingParams(temperature=0.0, presence_penalty=1.0)
    sampler.admit(Admitted("s", [1], 1, p, 1), None)
    logits = torch.tensor([ramp(i5=2.0, i3=1.5)])
    tokens = [sampler.sample([Row("s", i, [0], [0], sample=True)], logits).token_ids[0][0] for i in range(3)]
    assert tokens == [5, 3, 5]


def test_state_that_grew_token_by_token_is_the_one_built_from_all_tokens():
    """A session that was preempted is admitted again with its output, and must not notice."""
    p = SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2)
    draw = torch.Generator().manual_seed(0)
    grown = Sampler(kernels.reference(), (EOS,))
    grown.admit(Admitted("s", [1, 2, 2], 3, p, 1), None)
    tokens = [1, 2, 2]
    for i in range(40):
        row = Row("s", i + 2, [0], [0], sample=True)
        logits = torch.randn(1, VOCAB, generator=draw)
        built = Sampler(kernels.reference(), (EOS,))
        built.admit(Admitted("s", list(tokens), 3, p, 1), None)
        expected = built.sample([row], logits).token_ids
        assert grown.sample([row], logits).token_ids == expected
        tokens += expected[0]
    assert len(set(tokens)) > 5


def test_logit_bias_forces_and_forbids():
    assert sample(ramp(), logit_bias={0: 100.0}).token_ids == [[0]]
    assert sample(ramp(i4=3.0), logit_bias={4: -100.0}).token_ids == [[EOS]]


def test_end_and_stop_ids_are_forbidden_before_min_tokens_only():
    logits = ramp(i9=9.0, i8=8.0)
    assert sample(logits, min_tokens=2, stop_token_ids=(8,)).token_ids == [[7]]
    assert sample(logits, output=(1, 1), min_tokens=2, stop_token_ids=(8,)).token_ids == [[EOS]]


def test_a_row_that_is_not_finite_fails_alone():
    sampler = Sampler(kernels.reference(), (EOS,))
    for name in ("good", "bad"):
        sampler.admit(Admitted(name, [1], 1, SamplingParams(temperature=0.0), 1), None)
    rows = [Row("bad", 0, [1], [0], sample=True), Row("good", 0, [1], [1], sample=True)]
    logits = torch.tensor([ramp(i3=float("nan")), ramp(i3=5.0)])
    result = sampler.sample(rows, logits)
    assert set(result.failed) == {0}
    assert result.token_ids == [[], [3]]


def test_logprobs_are_of_the_model_before_penalties_and_temperature():
    result = sample(ramp(i5=2.0), output=(5,), presence_penalty=2.0, temperature=0.5, logprobs=2, top_k=1)
    (entry,) = result.logprobs[0]
    expected = torch.log_softmax(torch.tensor(ramp(i5=2.0)), 0)
    assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-5)
    assert [i for i, _ in entry.top] == [5, EOS]


def test_prompt_logprobs_cover_the_following_prompt_tokens_across_chunks():
    sampler = Sampler(kernels.reference(), (EOS,))
    prompt = [3, 1, 4, 1, 5]
    p = SamplingParams(temperature=0.0, prompt_logprobs=1)
    sampler.admit(Admitted("s", prompt, 5, p, 1), None)
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    expected = torch.log_softmax(logits, -1)
    got = []
    for start, n in ((0, 2), (2, 3)):
        row = Row("s", start, prompt[start : start + n], [0], sample=start + n == 5, prompt_logprobs=True)
        got += sampler.sample([row], logits[start : start + n]).prompt_logprobs[0]
    assert [e.token_id for e in got] == prompt[1:]
    assert [e.logprob for e in got] == pytest.approx(
        [float(expected[i, t]) for i, t in enumerate(prompt[1:])], abs=1e-5
    )


def test_rows_that_do_not_sample_take_no_logits():
    sampler = Sampler(kernels.reference(), (EOS,))
    for name in ("chunk", "decode"):
        sampler.admit(Admitted(name, [1, 2, 3], 3, SamplingParams(temperature=0.0), 1), None)
    rows = [Row("chunk", 0, [1, 2], [0], sample=False), Row("decode", 2, [3], [1], sample=True)]
    assert sampler.sample(rows, torch.tensor([ramp(i6=4.0)])).token_ids == [[], [6]]


def test_a_forgotten_session_leaves_nothing():
    sampler = Sampler(kernels.reference(), (EOS,))
    sampler.admit(Admitted("s", [1], 1, SamplingParams(), 1), None)
    sampler.forget("s")
    sampler.forget("s")
    assert not sampler.states
