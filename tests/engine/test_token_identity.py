"""Same tokens, whatever happens: a request's ids depend on nothing but its prompt, parameters and seed."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kilat.base import metrics
from kilat.base.hashing import branch_seed
from kilat.ops.cpu import kernels as cpu_kernels
from kilat.wire.sampling import Grammar
from tests.engine.harness import drain, make_engine, outputs, record, run, tiny_model

pytestmark = pytest.mark.cpu
QUICK = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module", params=["reference", "cpu"])
def model(request):
    """A random model on the torch reference and on the native kernels (where they can be built)."""
    if request.param == "reference":
        return tiny_model("qwen3")
    usable, why = cpu_kernels.available()
    if not usable:
        pytest.skip(why)
    return tiny_model("qwen3", cpu_kernels.cpu_kernels(2))


def sampling():
    """Greedy and seeded parameter sets, with penalties, filters, stops and lengths."""
    return st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.0, 0.7, 1.3]),
            "top_p": st.sampled_from([1.0, 0.9]),
            "top_k": st.sampled_from([0, 20]),
            "seed": st.integers(0, 3),
            "max_tokens": st.integers(1, 20),
            "repetition_penalty": st.sampled_from([1.0, 1.3]),
            "frequency_penalty": st.sampled_from([0.0, 0.5]),
            "ignore_eos": st.booleans(),
        }
    )


# few distinct prefixes, so that prefix hits happen
prompts = st.builds(
    lambda head, tail: [(head * 31 + i * 7) % 256 for i in range(head * 9)] + tail,
    st.integers(0, 4),
    st.lists(st.integers(0, 255), min_size=1, max_size=20),
)


@QUICK
@given(
    jobs=st.lists(st.tuples(prompts, sampling()), min_size=1, max_size=7),
    step_tokens=st.integers(1, 40),
    n_pages=st.integers(
        10, 40
    ),  # the longest prompt with its answer fits, or the length of a session would end it
    depth=st.sampled_from([1, 2]),
    seqs=st.integers(1, 8),
)
def test_batched_chunked_cached_and_preempted_equal_alone(model, jobs, step_tokens, n_pages, depth, seqs):
    alone = {}
    for i, (prompt, params) in enumerate(jobs):
        engine = make_engine(model, cache=False, step_tokens=256)
        alone |= run(engine, [record(f"s{i}", prompt, **params)])
    step_tokens = max(step_tokens, seqs)
    crowded = make_engine(model, n_pages=n_pages, step_tokens=step_tokens, depth=depth, seqs=seqs)
    records = [record(f"s{i}", prompt, **params) for i, (prompt, params) in enumerate(jobs)]
    assert run(crowded, records) == alone
    again = {f"again-{k}": v for k, v in alone.items()}
    repeat = [
        record(f"again-{r.session_id}", r.prompt_ids, **params) for r, (_, params) in zip(records, jobs)
    ]
    assert run(crowded, repeat) == again
    crowded.close()


def test_a_full_pool_preempts_and_the_preempted_session_goes_on_with_the_same_tokens(model):
    jobs = [
        record(f"s{i}", [i, i + 1, i + 2], max_tokens=40, ignore_eos=True, temperature=0.9, seed=i)
        for i in range(4)
    ]
    alone = {}
    for job in jobs:
        alone |= run(make_engine(model), [job])
    engine = make_engine(model, n_pages=12, page_tokens=8)
    assert run(engine, jobs) == alone
    assert engine.counters()[metrics.PREEMPTIONS] > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("n_prompt", [1, 7, 8, 9, 17])
def test_samples_of_one_prompt_equal_single_requests_with_their_seeds(model, n_prompt, depth):
    prompt = list(range(40, 40 + n_prompt))
    engine = make_engine(model, depth=depth)
    together = run(engine, [record("s", prompt, n=4, temperature=1.0, seed=9)])
    for k, name in enumerate(["s", "s#1", "s#2", "s#3"]):
        single = run(make_engine(model), [record("x", prompt, temperature=1.0, seed=branch_seed(9, k))])
        assert together[name] == single["x"]
    assert len({tuple(v) for v in together.values()}) > 1
    engine.close()


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_a_session_adopted_by_another_engine_goes_on_with_the_same_tokens(model, cut):
    job = record(
        "s", [3, 1, 4, 1, 5, 9, 2, 6, 5], temperature=0.8, seed=3, frequency_penalty=0.4, ignore_eos=True
    )
    whole = run(make_engine(model), [job])["s"]
    first = make_engine(model)
    first.submit(job)
    got = []
    while len(got) < cut:
        got += [t for e in first.step() for t in e.token_ids]
    moved = first.scheduler.export("s")
    assert moved.output_ids == whole[:cut]
    assert run(make_engine(model), [moved])["s"] == whole[cut:]


@pytest.mark.parametrize("depth", [1, 2])
def test_constrained_sessions_equal_alone_beside_unconstrained_ones(model, depth):
    schema = Grammar(
        "json_schema",
        '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}',
    )
    jobs = [
        record("json", [1, 2, 3], grammar=schema, temperature=1.0, max_tokens=30),
        record("regex", [4, 5], grammar=Grammar("regex", "[a-f]{6}"), temperature=1.0, max_tokens=30),
        record("free", [6, 7, 8], max_tokens=30, ignore_eos=True),
    ]
    alone = {}
    for job in jobs:
        alone |= run(make_engine(model, grammar=True), [job])
    engine = make_engine(model, grammar=True, depth=depth)
    assert run(engine, jobs) == alone
    assert len(alone["regex"]) == 6
    engine.close()


def test_aborted_neighbours_change_nothing(model):
    job = record("keep", [9, 8, 7], max_tokens=25, ignore_eos=True)
    alone = run(make_engine(model), [job])["keep"]
    engine = make_engine(model, depth=2)
    events = []
    for i in range(6):
        engine.submit(record(f"drop{i}", [9, 8, 7, i], max_tokens=50, ignore_eos=True, n=2))
    engine.submit(job)
    for i in range(6):
        for _ in range(i):
            events += engine.step()
        events += engine.abort([f"drop{i}"])
    events += drain(engine)
    assert outputs(events)["keep"] == alone
    assert engine.gauges()[metrics.PAGES_USED] == 0
    engine.close()
