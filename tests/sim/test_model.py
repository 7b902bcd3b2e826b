"""The model without math: what it says depends on every token in the pages, and on nothing else."""

import pytest

from kilat.base.errors import EngineError
from kilat.policy.sched.config import SchedulerConfig
from kilat.policy.sched.plan import Admitted, Row, StepPlan
from kilat.policy.sched.scheduler import Scheduler
from kilat.sim.model import EOS, VOCAB, Runner, StepCost, expected, next_token
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SessionRecord

pytestmark = pytest.mark.logic

CONFIG = SchedulerConfig(n_pages=32, page_tokens=4, max_model_len=64, max_num_seqs=4, max_step_tokens=16)


def record(prompt, **params):
    return SessionRecord("s", list(prompt), SamplingParams(**{"seed": 3, "max_tokens": 9, **params}))


def run(scheduler: Scheduler, runner: Runner) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {}
    while (plan := scheduler.plan(0.0)) is not None:
        for e in scheduler.commit(plan, runner.run(plan), 0.0):
            out.setdefault(e.session_id, []).extend(e.token_ids)
    return out


@pytest.mark.parametrize("n", [1, 3])
def test_scheduler_and_runner_give_what_is_expected_of_a_request_alone(n):
    scheduler, runner = Scheduler(CONFIG, model_id="m", eos_ids=[EOS]), Runner(32, 4)
    r = record(range(11), n=n)
    scheduler.submit(r, 0.0)
    out = run(scheduler, runner)
    assert len(out) == n
    assert list(out.values()) == [expected(r, k, 64) for k in range(n)]


def test_what_is_expected_ends_at_the_stop_token_the_most_tokens_and_the_limit():
    r = next(
        r
        for r in (record([i], max_tokens=400) for i in range(VOCAB))
        if EOS in expected(record(r.prompt_ids, max_tokens=400, ignore_eos=True), 0, 300)
    )
    stopped = expected(r, 0, 300)
    assert next_token([*r.prompt_ids, *stopped], 3) == EOS
    assert len(expected(record([5], max_tokens=4, ignore_eos=True), 0, 300)) == 4
    assert len(expected(record([5], max_tokens=None, ignore_eos=True), 0, 20)) == 19


def test_one_wrong_token_in_a_page_changes_what_follows():
    tokens = [1, 2, 3, 4, 5, 6]
    said = next_token(tokens, 3)
    assert all(next_token([*tokens[:i], 90, *tokens[i + 1 :]], 3) != said for i in range(len(tokens)))


def test_reading_a_token_that_nobody_wrote_is_an_error():
    runner = Runner(4, 4)
    r = record([1, 2, 3])
    plan = StepPlan(0, [Row("s", 2, [3], [0], True)], [Admitted("s", [1, 2, 3], 3, r.params, 3)])
    with pytest.raises(EngineError, match="never written"):
        runner.run(plan)


def test_without_content_only_numbers_of_tokens_count():
    runner = Runner(4, 4, content=False)
    plan = StepPlan(0, [Row("s", 2, [3], [0], True), Row("t", 0, [1, 2], [1], False)])
    assert runner.run(plan).token_ids == [[1], []]


def test_a_step_costs_its_start_its_prompt_tokens_and_its_rows():
    plan = StepPlan(0, [Row("s", 7, [3], [0, 1], True), Row("t", 0, [1, 2, 3], [2], False)])
    cost = StepCost(base_s=1.0, prompt_token_s=0.1, row_s=0.01, context_token_s=0.001)
    assert cost.seconds(plan) == pytest.approx(1.0 + 0.3 + 0.01 + 0.007)
