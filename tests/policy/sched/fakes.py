"""A model without math and a runner without a device: the next token is a hash of all tokens before it, read back from fake pages."""

from array import array
from collections.abc import Callable, Iterable
from zlib import crc32

from kilat.base.hashing import branch_seed
from kilat.policy.sched.config import SchedulerConfig
from kilat.policy.sched.plan import PENDING, Admitted, Row, StepPlan, StepResult
from kilat.policy.sched.scheduler import Scheduler
from kilat.wire.messages import SessionEvent, TokenLogprob
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SessionRecord

VOCAB = 97
EOS = 96


def next_token(tokens: list[int], seed: int) -> int:
    """What the fake model says after ``tokens``."""
    return crc32(array("i", tokens).tobytes(), seed & 0xFFFFFFFF) % VOCAB


def record(session_id: str, prompt: Iterable[int], **options: object) -> SessionRecord:
    """A record; options that are not fields of the record are sampling parameters. Nothing but max_tokens stops it by default."""
    of_record = {k: options.pop(k) for k in list(options) if k in SessionRecord.__struct_fields__}
    params = SamplingParams(**{"seed": 7, "ignore_eos": True, "max_tokens": 4, **options})
    return SessionRecord(session_id=session_id, prompt_ids=list(prompt), params=params, **of_record)


def alone(r: SessionRecord, branch: int, limit: int) -> tuple[list[int], str, int | None]:
    """The oracle: output, finish reason and stop id of one sample that runs by itself, from the definition of the parameters."""
    p = r.params
    seed = branch_seed(p.seed, branch)
    tokens = [*r.prompt_ids]
    while True:
        token = next_token(tokens, seed)
        n = len(tokens) - len(r.prompt_ids)
        if n >= p.min_tokens and (token in p.stop_token_ids or (token == EOS and not p.ignore_eos)):
            return tokens[len(r.prompt_ids) :], "stop", token
        tokens.append(token)
        if len(tokens) == limit or n + 1 == p.max_tokens:
            return tokens[len(r.prompt_ids) :], "length", None


class FakeRunner:
    """Executes plans at once and checks what a runner may rely on. ``burst(session_id)``: tokens a sampling row gives.

    ``failing``: session ids whose next sampling row fails.
    """

    def __init__(self, n_pages: int, page_tokens: int, burst: Callable[[str], int] = lambda _: 1) -> None:
        self.page_tokens = page_tokens
        self.kv: list[list[int | None]] = [[None] * page_tokens for _ in range(n_pages)]
        self.states: dict[str, Admitted] = {}
        self.last: dict[str, int] = {}
        self.burst = burst
        self.failing: set[str] = set()
        self.n_tokens = 0

    def run(self, plan: StepPlan) -> StepResult:
        for session_id in plan.gone:
            del self.states[session_id]
            self.last.pop(session_id, None)
        for a in plan.admitted:
            assert a.session_id not in self.states, "admitted twice"
            self.states[a.session_id] = a
        for source, destination in plan.copies:
            assert destination not in [p for r in plan.rows for p in r.pages if p == source]
            self.kv[destination] = list(self.kv[source])
        assert len({r.session_id for r in plan.rows}) == len(plan.rows), "two rows of one session"
        result = StepResult([[] for _ in plan.rows])
        for row in plan.rows:
            self._write(row)
        for i, row in enumerate(plan.rows):
            self._sample(i, row, result)
        return result

    def _write(self, row: Row) -> None:
        self.n_tokens += row.n_tokens
        for position, token in enumerate(row.token_ids, row.start):
            token = self.last[row.session_id] if token == PENDING else token
            self.kv[row.pages[position // self.page_tokens]][position % self.page_tokens] = token

    def _sample(self, i: int, row: Row, result: StepResult) -> None:
        state = self.states[row.session_id]
        context = self.context(row)
        if row.prompt_logprobs:
            following = state.token_ids[row.start + 1 : min(row.start + row.n_tokens + 1, state.n_prompt)]
            result.prompt_logprobs[i] = [TokenLogprob(t, -float(t)) for t in following]
        if not row.sample:
            return
        if row.session_id in self.failing:
            self.failing.remove(row.session_id)
            result.failed[i] = "logits are not finite"
            self.last[row.session_id] = 0  # a PENDING row may follow; its result is dropped
            return
        for _ in range(self.burst(row.session_id)):
            token = next_token(context, state.seed)
            context.append(token)
            result.token_ids[i].append(token)
        if state.params.logprobs is not None:
            result.logprobs[i] = [TokenLogprob(t, -float(t)) for t in result.token_ids[i]]
        self.last[row.session_id] = context[-1]

    def context(self, row: Row) -> list[int]:
        """All tokens up to the end of the row, as attention would find them in the pages."""
        tokens = []
        for position in range(row.start + row.n_tokens):
            token = self.kv[row.pages[position // self.page_tokens]][position % self.page_tokens]
            assert token is not None, "attends to a token that was never written"
            tokens.append(token)
        return tokens


class Rig:
    """A scheduler and a fake runner with up to ``depth`` steps in flight; ``output`` and ``finish`` gather what the events say."""

    def __init__(
        self, *, model_id: str = "fake", burst: Callable[[str], int] = lambda _: 1, **config: object
    ) -> None:
        defaults = {
            "n_pages": 64,
            "page_tokens": 4,
            "max_model_len": 128,
            "max_num_seqs": 8,
            "max_step_tokens": 32,
        }
        self.config = SchedulerConfig(**{**defaults, **config})
        self.scheduler = Scheduler(self.config, model_id=model_id, eos_ids=[EOS])
        self.runner = FakeRunner(self.config.n_pages, self.config.page_tokens, burst)
        self.in_flight: list[tuple[StepPlan, StepResult]] = []
        self.now_s = 0.0
        self.plans: list[StepPlan] = []
        self.events: list[SessionEvent] = []
        self.output: dict[str, list[int]] = {}
        self.finish: dict[str, str] = {}

    def submit(
        self, session_id: str, prompt: Iterable[int], *, hand_over: bool = False, **options: object
    ) -> SessionRecord:
        r = record(session_id, prompt, **options)
        self.scheduler.submit(r, self.now_s, hand_over=hand_over)
        return r

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now_s)
        self.scheduler.check()
        if plan is not None:
            self._check_writes(plan)
            self.plans.append(plan)
            self.in_flight.append((plan, self.runner.run(plan)))
        return plan

    def commit(self) -> list[SessionEvent]:
        self.now_s += 0.01
        events = self.scheduler.commit(*self.in_flight.pop(0), self.now_s)
        self.take(events)
        return events

    def abort(self, *session_ids: str) -> list[SessionEvent]:
        events = self.scheduler.abort(session_ids, self.now_s)
        self.take(events)
        return events

    def take(self, events: list[SessionEvent]) -> None:
        self.scheduler.check()
        for e in events:
            assert e.session_id not in self.finish, "news after the end"
            before = [x for x in self.events if x.session_id == e.session_id]
            assert not before or e.seq == before[-1].seq + 1
            self.events.append(e)
            self.output.setdefault(e.session_id, []).extend(e.token_ids)
            if e.finish is not None:
                self.finish[e.session_id] = e.finish

    def step(self) -> StepPlan | None:
        """Plan a step and commit one when enough are in flight (or nothing can be planned)."""
        if len(self.in_flight) == self.config.depth:
            self.commit()
        plan = self.plan()
        if self.in_flight and (plan is None or len(self.in_flight) == self.config.depth):
            self.commit()
        return plan

    def run(self, limit: int = 2000) -> None:
        """Until nothing is left to do."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            was_in_flight = bool(self.in_flight)
            assert self.step() is not None or was_in_flight, "stuck"
        raise AssertionError("does not come to an end")

    def counter(self, name: str) -> float:
        return self.scheduler.counters()[name]

    def gauge(self, name: str) -> float:
        return self.scheduler.gauges()[name]

    def _check_writes(self, plan: StepPlan) -> None:
        """No page that an outstanding plan may write is written for another session, and no page twice in one plan."""
        writer: dict[int, str] = {}
        for p in [*(p for p, _ in self.in_flight), plan]:
            for row in p.rows:
                for position in range(row.start, row.start + row.n_tokens):
                    page = row.pages[position // self.config.page_tokens]
                    assert writer.setdefault(page, row.session_id) == row.session_id, "a page has two writers"


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    """(session id, start, tokens) of each row."""
    return [(r.session_id, r.start, r.n_tokens) for r in plan.rows]
