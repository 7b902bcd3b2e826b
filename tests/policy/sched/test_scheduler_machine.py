"""Random work on small schedulers: whatever happens, every session's tokens are those it gets when it runs alone."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kilat.base.errors import CapacityError
from kilat.base.ids import branch_id
from kilat.wire.sampling import Grammar
from kilat.wire.session import SessionRecord
from tests.policy.sched.fakes import EOS, Rig, alone

pytestmark = pytest.mark.logic

configs = st.fixed_dictionaries(
    {
        "n_pages": st.integers(3, 20),
        "page_tokens": st.sampled_from([1, 2, 3, 4]),
        "max_model_len": st.integers(6, 40),
        "max_num_seqs": st.integers(1, 6),
        "max_step_tokens": st.integers(1, 24),
        "max_waiting": st.integers(0, 12),
        "prefix_cache": st.sampled_from([True, True, False]),
        "tenant_weights": st.sampled_from([{}, {"a": 3.0}]),
        "target_step_s": st.sampled_from([None, 0.01, 0.0001]),
    }
)
params = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 3),
        "n": st.sampled_from([1, 1, 1, 2, 4]),
        "max_tokens": st.sampled_from([None, 1, 2, 5, 12]),
        "min_tokens": st.sampled_from([0, 0, 3]),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), (), tuple(range(0, EOS, 5))]),
        "prompt_logprobs": st.sampled_from([None, None, None, 0]),
        "logprobs": st.sampled_from([None, None, 0]),
        "grammar": st.sampled_from([None, None, None, Grammar("json_object")]),
        "tenant": st.sampled_from(["a", "b", "c"]),
        "priority": st.sampled_from([0, 0, 0, 1, -1]),
        "salt": st.sampled_from(["", "", "s"]),
    }
)
# few ids and a common start, so that prompts share pages
prompts = st.tuples(st.integers(0, 12), st.lists(st.integers(0, 1), max_size=14)).map(
    lambda x: [0, 0, 1] * x[0] + x[1]
)


class SchedulerMachine(RuleBasedStateMachine):
    """Rig checks the invariants after every operation, and that no two outstanding plans write a page for two sessions."""

    depth = 1
    bursts = False

    @initialize(config=configs, burst=st.integers(1, 4))
    def start(self, config: dict, burst: int):
        self.rig = Rig(depth=self.depth, burst=lambda _: burst if self.bursts else 1, **config)
        self.records: dict[str, SessionRecord] = {}
        self.n_submitted = 0

    @rule(prompt=prompts, options=params, late=st.integers(0, 3))
    def submit(self, prompt: list[int], options: dict, late: int):
        session_id = f"s{self.n_submitted}"
        prompt = (prompt or [0])[: self.rig.config.max_session_tokens - 1]
        try:
            r = self.rig.submit(session_id, prompt, arrival_s=float(self.n_submitted - late), **options)
        except CapacityError:
            assert self.rig.gauge("kilat_sessions_waiting") >= self.rig.config.max_waiting
            return
        self.n_submitted += 1
        self.records[session_id] = r

    @rule()
    def step(self):
        self.rig.step()

    @precondition(lambda self: len(self.rig.in_flight) < self.depth)
    @rule()
    def plan(self):
        self.rig.plan()

    @precondition(lambda self: self.rig.in_flight)
    @rule()
    def commit(self):
        self.rig.commit()

    @precondition(lambda self: self.records)
    @rule(data=st.data(), k=st.sampled_from([None, None, 0, 1, 3]))
    def abort(self, data: st.DataObject, k: int | None):
        session_id = data.draw(st.sampled_from(sorted(self.records)))
        self.rig.abort(session_id if k is None else f"{session_id}#{k}")

    @precondition(lambda self: self.rig.scheduler._roster.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject):
        running = [s.id for s in self.rig.scheduler._roster.running]
        self.rig.runner.failing.add(data.draw(st.sampled_from(sorted(running))))

    @precondition(lambda self: any(s.n_flight == 0 for s in self.rig.scheduler._roster.running))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject):
        """As if the pages of any session were needed right now."""
        roster = self.rig.scheduler._roster
        free = {s.id: s for s in roster.running if s.n_flight == 0}
        roster.preempt(free[data.draw(st.sampled_from(sorted(free)))])
        self.rig.scheduler.check()

    def teardown(self):
        if not hasattr(self, "rig"):
            return
        self.rig.run()
        limit = self.rig.config.max_session_tokens
        for r in self.records.values():
            for k in range(r.params.n):
                session_id = branch_id(r.session_id, k)
                output, finish, _ = alone(r, k, limit)
                got = self.rig.output[session_id]
                if self.rig.finish[session_id] in ("abort", "error"):
                    assert got == output[: len(got)]
                else:
                    assert (got, self.rig.finish[session_id]) == (output, finish)
        self.check_prompt_logprobs()
        assert self.rig.gauge("kilat_pages_used") == 0
        assert not self.rig.scheduler.has_work
        assert set(self.rig.runner.states) <= set(self.rig.finish)

    def check_prompt_logprobs(self):
        for e in self.rig.events:
            if e.prompt_logprobs is not None:
                ids = [x.token_id for x in e.prompt_logprobs[1:]]
                assert (e.prompt_logprobs[0], ids) == (None, self.records[e.session_id].prompt_ids[1:])
        for r in self.records.values():
            told = [
                e for e in self.rig.events if e.session_id == r.session_id and e.prompt_logprobs is not None
            ]
            wanted = r.params.prompt_logprobs is not None
            assert len(told) <= wanted
            if wanted and self.rig.finish[r.session_id] in ("stop", "length"):
                assert told


class BurstMachine(SchedulerMachine):
    bursts = True


class RunAheadMachine(SchedulerMachine):
    depth = 2


modest = settings(
    max_examples=60,
    stateful_step_count=40,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],  # explaining a failure takes minutes
    suppress_health_check=list(HealthCheck),
)
for machine in (SchedulerMachine, BurstMachine, RunAheadMachine):
    machine.TestCase.settings = modest

TestSchedulerMachine = SchedulerMachine.TestCase
TestBurstMachine = BurstMachine.TestCase
TestRunAheadMachine = RunAheadMachine.TestCase
