"""A session that goes from one engine to another with its pages gets the tokens that it gets on one engine."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kilat.base import metrics
from kilat.base.errors import NotFoundError, RequestError
from kilat.engine.core import Engine
from kilat.ops.cpu import kernels as cpu_kernels
from kilat.policy.sched.moves import Arrived, Departed
from kilat.wire.messages import SessionEvent
from kilat.wire.sampling import Grammar
from kilat.wire.session import SessionRecord
from tests.engine.harness import drain, make_engine, record, run, tiny_model

pytestmark = pytest.mark.cpu
PROMPT = [(i * 37 + 11) % 256 for i in range(29)]  # three pages and a half
SCHEMA = Grammar(
    "json_schema",
    '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}',
)
JOBS = {
    "greedy": {"ignore_eos": True},
    "seeded": {"temperature": 0.9, "seed": 3, "top_p": 0.9, "ignore_eos": True},
    "penalties": {"temperature": 0.8, "seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "samples": {"temperature": 1.0, "seed": 9, "n": 4},
    "json": {"temperature": 1.0, "grammar": SCHEMA, "max_tokens": 30},
    "logprobs": {"logprobs": 2, "ignore_eos": True},
    "prompt logprobs": {"prompt_logprobs": 1, "temperature": 0.7},
}


@pytest.fixture(scope="module", params=["reference", "cpu"])
def model(request):
    if request.param == "reference":
        return tiny_model("qwen3")
    usable, why = cpu_kernels.available()
    if not usable:
        pytest.skip(why)
    return tiny_model("qwen3", cpu_kernels.cpu_kernels(2))


def leave(engine: Engine, session_id: str, events: list[SessionEvent]) -> Departed:
    """Step until the session can depart."""
    for _ in range(2000):
        if session_id in engine.take_frozen():
            return engine.depart(session_id)
        events += engine.step()
    raise AssertionError("it never froze")


def arrive(old: Engine, gone: Departed, new: Engine, n_pages: int | None = None) -> None:
    """Copy the first ``n_pages`` pages (all without a number), then adopt."""
    take = gone.pages[:n_pages]
    reserved = new.reserve(len(take))
    new.pages.view[reserved] = old.pages.view[take]
    n_tokens = min(gone.n_tokens, len(take) * new.info.page_tokens)
    new.submit(replace(gone.record, epoch=gone.record.epoch + 1), Arrived(reserved, n_tokens))
    old.unpin(gone.pages)


def tokens(events: list[SessionEvent]) -> dict[str, list[tuple]]:
    """Session id -> (ids, log-probabilities) of each event with tokens, in order of sequence numbers, and the finish."""
    out: dict[str, list] = {}
    for e in sorted(events, key=lambda e: (e.epoch, e.seq)):
        if e.token_ids or e.finish:
            out.setdefault(e.session_id, []).append((e.seq, e.token_ids, e.logprobs, e.finish))
    return out


def all_free(*engines: Engine) -> None:
    for engine in engines:
        engine.scheduler.check()
        assert engine.gauges()[metrics.PAGES_USED] == 0
        assert not engine.has_work
        engine.close()


@pytest.mark.parametrize("warm", ["cold", "source warm", "both warm"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("job", JOBS)
def test_handed_over_session_equals_one_engine(model, job: str, depth: int, warm: str):
    r = record("s", PROMPT, **JOBS[job])
    one = make_engine(model, grammar=True)
    one.submit(r)
    whole = tokens(drain(one))
    old, new = (make_engine(model, grammar=True, depth=depth, shared=True) for _ in range(2))
    for engine in {"cold": (), "source warm": (old,), "both warm": (old, new)}[warm]:
        run(engine, [record("warm", PROMPT[:20], max_tokens=2)])
    events: list[SessionEvent] = []
    old.submit(r, hand_over=True)
    gone = leave(old, "s", events)
    assert [e.token_ids for e in events] == [gone.record.output_ids]
    assert gone.n_tokens == len(PROMPT)
    before = new.runner.model_s
    arrive(old, gone, new)
    events += drain(new)
    assert new.runner.model_s > before
    assert tokens(events) == whole
    all_free(one, old, new)


@pytest.mark.parametrize("runner", ["host", "device"])
def test_only_the_last_token_is_computed_where_the_pages_arrive(model, runner: str):
    old, new = make_engine(model, runner=runner), make_engine(model, runner=runner)
    old.submit(record("s", PROMPT, n=2, temperature=1.0), hand_over=True)
    arrive(old, leave(old, "s", []), new)
    rows = []
    launch = new.runner.launch
    new.runner.launch = lambda plan: rows.extend(plan.rows) or launch(plan)
    drain(new)
    assert {r.n_tokens for r in rows} == {1}
    assert min(r.start for r in rows) == len(PROMPT) - 1  # the second sample draws from the last prompt token
    all_free(old, new)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    n_steps=st.integers(0, 12),
    n_pages=st.integers(0, 9),
    depths=st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2])),
    runner=st.sampled_from(["host", "device"]),
    step_tokens=st.integers(8, 40),
    job=st.sampled_from(["greedy", "seeded", "penalties", "samples", "json"]),
)
def test_exported_at_any_step_with_any_pages_it_goes_on(
    model, n_steps, n_pages, depths, runner, step_tokens, job
):
    r = record("s", PROMPT, **JOBS[job])
    one = make_engine(model, grammar=True)
    one.submit(r)
    whole = tokens(drain(one))
    old, new = (
        make_engine(model, grammar=True, depth=depth, step_tokens=step_tokens, runner=runner)
        for depth in depths
    )
    old.submit(r)
    events: list[SessionEvent] = []
    for _ in range(n_steps):
        events += old.step()
    moved: set[str] = set()
    for session_id in ("s", "s#1", "s#2", "s#3"):
        try:
            old.freeze(session_id)
        except NotFoundError:
            continue  # it has ended, or goes with sample 0
    while old.has_work:
        for session_id in old.take_frozen():
            moved.add(session_id)
            arrive(old, old.depart(session_id), new, n_pages)
        events += old.step()
    events += drain(new)
    got = tokens(events)
    assert got == whole
    assert {e.session_id for e in events if e.epoch == 1} >= moved
    all_free(one, old, new)


@pytest.mark.parametrize("phase", ["computing", "frozen", "departed", "arrived", "decoding"])
@pytest.mark.parametrize("grammar", [None, SCHEMA])
def test_aborted_in_any_phase_no_page_is_left(model, phase: str, grammar: Grammar | None):
    old, new = (make_engine(model, depth=2, step_tokens=16, grammar=True) for _ in range(2))
    old.submit(record("s", PROMPT, n=2, max_tokens=40, grammar=grammar), hand_over=True)
    events: list[SessionEvent] = []
    if phase == "computing":
        while not old.gauges()[metrics.PAGES_USED]:
            events += old.step()
        assert {e.finish for e in old.abort(["s"])} == {"abort"}
    elif phase == "frozen":
        while not events:
            events += old.step()
        assert {e.finish for e in old.abort(["s"])} == {"abort"}
        assert old.take_frozen() == []
    else:
        gone = leave(old, "s", events)
        if phase == "departed":
            assert old.abort(["s"]) == []
            old.unpin(gone.pages)
        else:
            arrive(old, gone, new)
            while phase == "decoding" and not new.step():
                pass
            assert {e.finish for e in new.abort(["s"])} == {"abort"}
    drain(old)
    drain(new)
    all_free(old, new)


@pytest.mark.parametrize("arrived", [False, True])
def test_session_that_waits_for_its_grammar_can_leave(model, arrived: bool):
    old, new = make_engine(model, grammar=True), make_engine(model, grammar=True)
    r = record("s", PROMPT, **JOBS["json"])
    whole = run(make_engine(model, grammar=True), [r])
    pages = old.reserve(2) if arrived else []
    old.submit(r, Arrived(pages, 16) if arrived else None)
    assert old.computed("s") == (0, [])
    old.freeze("s")
    old.freeze("s")
    assert old.export("s") == r
    assert old.step() == []
    assert old.take_frozen() == ["s"]
    gone = old.depart("s")
    assert gone == Departed(r, pages, 16 if arrived else 0)
    old.unpin(gone.pages)
    assert run(new, [gone.record]) == whole
    all_free(old, new)


@pytest.mark.parametrize("end", ["abort", "bad grammar"])
def test_pages_of_a_session_that_never_got_its_grammar_are_given_back(model, end: str):
    engine = make_engine(model, grammar=True)
    grammar = SCHEMA if end == "abort" else Grammar("regex", "(")
    engine.submit(record("s", PROMPT, grammar=grammar), Arrived(engine.reserve(2), 16))
    events = engine.abort(["s"]) if end == "abort" else drain(engine)
    assert [e.finish for e in events] == ["abort" if end == "abort" else "error"]
    all_free(engine)


def test_refused_session_leaves_its_pages_to_the_caller(model):
    engine = make_engine(model)
    pages = engine.reserve(2)
    with pytest.raises(RequestError):
        engine.submit(record("s", [9999]), Arrived(pages, 1))
    engine.unpin(pages)
    all_free(engine)


def test_events_of_samples_that_never_ran_on_the_second_engine_count_from_their_own_start(model):
    old, new = make_engine(model, grammar=True), make_engine(model, grammar=True)
    old.submit(record("s", PROMPT, n=3, grammar=SCHEMA, temperature=1.0), hand_over=True)
    arrive(old, leave(old, "s", []), new)
    seqs = {e.session_id: e.seq for e in new.abort(["s"])}
    assert seqs == {"s": 1, "s#1": 0, "s#2": 0}
    all_free(old, new)


def test_lent_prefix_is_a_hit_on_the_second_engine(model):
    old, new = make_engine(model), make_engine(model, shared=True)
    whole = run(old, [record("a", PROMPT)])["a"]
    names = names_of(old, PROMPT)
    changes = new.watch_pages()
    lent = old.lend([*names, b"more"])
    reserved = new.reserve(len(lent))
    new.pages.view[reserved] = old.pages.view[lent]
    new.seal_arrived(reserved, names)
    old.unpin(lent)
    assert sorted(changes.take()[0]) == sorted(names) == sorted(new.page_names())
    new.submit(record("b", PROMPT))
    events = drain(new)
    assert events[0].cached_tokens == 24
    assert [t for e in events for t in e.token_ids] == whole
    all_free(old, new)


def names_of(engine: Engine, prompt: list[int]) -> list[bytes]:
    """The page names of a prompt, from a session that has computed it."""
    engine.submit(SessionRecord("names", prompt, record("x", prompt).params))
    engine.step()
    names = engine.export("names").page_hashes
    _, pages = engine.computed("names")
    engine.pin(pages)
    engine.abort(["names"])
    engine.unpin(pages)
    return names
