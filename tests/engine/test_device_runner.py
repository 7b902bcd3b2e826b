"""The device runner gives the host runner's tokens; here its device is the CPU and no graph is captured."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kilat.base import metrics
from kilat.engine.graphs import ROW_BUCKETS, TOKEN_BUCKETS, Shape, likely_shapes
from kilat.wire.sampling import Grammar
from tests.engine.harness import drain, make_engine, record, run, tiny_model

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen2")


def params():
    return st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.8]),
            "top_p": st.sampled_from([1.0, 0.9]),
            "top_k": st.sampled_from([0, 20]),
            "seed": st.integers(-3, 3),
            "max_tokens": st.integers(1, 12),
            "n": st.sampled_from([1, 1, 3]),
            "frequency_penalty": st.sampled_from([0.0, 0.0, 0.5]),
            "logprobs": st.sampled_from([None, None, 2]),
            "ignore_eos": st.booleans(),
        }
    )


prompts = st.lists(st.integers(0, 255), min_size=1, max_size=30)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    jobs=st.lists(st.tuples(prompts, params()), min_size=1, max_size=5),
    step_tokens=st.integers(8, 40),
    n_pages=st.integers(10, 40),
    depth=st.sampled_from([1, 2]),
)
def test_ids_equal_the_host_runners(model, jobs, step_tokens, n_pages, depth):
    records = [record(f"s{i}", prompt, **p) for i, (prompt, p) in enumerate(jobs)]
    expected = run(make_engine(model, step_tokens=64), records)
    engine = make_engine(model, n_pages=n_pages, step_tokens=step_tokens, depth=depth, runner="device")
    assert run(engine, records) == expected
    engine.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_constrained_and_aborted_sessions_beside_plain_ones(model, depth):
    jobs = [
        record(f"s{i}", [i, i + 1], max_tokens=40, ignore_eos=True, temperature=0.9, seed=i) for i in range(4)
    ]
    jobs.append(record("json", [9], grammar=Grammar("regex", "[a-f]{6}"), temperature=1.0, max_tokens=30))
    expected = run(make_engine(model, grammar=True), jobs)
    engine = make_engine(model, n_pages=12, depth=depth, grammar=True, runner="device")
    engine.submit(record("drop", [1, 2, 3], max_tokens=50, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.abort(["drop"])
    assert run(engine, jobs) == expected
    assert engine.counters()[metrics.PREEMPTIONS] > 0
    engine.close()


def test_more_sessions_than_the_largest_bucket_decode_together_in_a_buffer_of_their_number(model):
    rows = ROW_BUCKETS[-1] + 8
    engine = make_engine(model, seqs=rows, n_pages=rows + 8, step_tokens=2 * rows, depth=2, runner="device")
    shape = Shape(rows, rows, 1, 64, "greedy")
    assert len(engine.runner._buffer.host(shape)["page_table"]) == rows
    assert engine.runner._buffer.max_rows == rows
    jobs = [record(f"s{i}", [i % 200], max_tokens=3, ignore_eos=True) for i in range(rows)]
    together = run(engine, jobs)
    assert together["s7"] == run(make_engine(model), [jobs[7]])["s7"]
    engine.close()


def test_slots_return_when_sessions_end(model):
    engine = make_engine(model, seqs=4, depth=2, runner="device")
    for round_ in range(6):
        run(engine, [record(f"r{round_}-{i}", [i, round_], max_tokens=1 + i) for i in range(6)])
    run(engine, [record("last", [1])])
    assert len(engine.runner._slots) <= 1
    engine.close()


def test_likely_shapes_hold_every_step_of_a_small_server_and_are_bounded():
    shapes = list(likely_shapes(64, 2048, 2048))
    assert len(set(shapes)) == len(shapes) < 250
    decode = [s for s in shapes if s.max_q_len == 1 and s.mode == "greedy"]
    assert shapes[: len(decode)] == decode and [s.rows for s in decode] == [r for r in ROW_BUCKETS if r <= 64]
    assert {s.tokens for s in shapes if s.max_q_len > 1} == set(TOKEN_BUCKETS)
    assert all(s.rows <= 64 and s.tokens <= 2048 for s in shapes)


def test_steps_on_the_scratch_page_between_others_change_no_id(model):
    jobs = [record(f"s{i}", [i] * (i + 1), max_tokens=12, ignore_eos=True) for i in range(5)]
    expected = run(make_engine(model), jobs)
    engine = make_engine(model, runner="device", depth=1)
    runner = engine.runner
    shapes = iter(
        likely_shapes(runner.limits.max_rows, runner.limits.max_tokens, runner.limits.max_model_len)
    )
    for job in jobs:
        engine.submit(job)
    got = {}
    while engine.has_work:
        for event in engine.step():
            got.setdefault(event.session_id, []).extend(event.token_ids)
        shape = next(shapes, None)
        if shape is not None:
            runner._send_scratch(shape)
            assert len(runner.graphs.compute(shape)) == shape.rows
    assert got == {k: list(v) for k, v in expected.items()}
    engine.close()


def test_products_are_measured_while_nothing_runs_before_anything_is_captured(model):
    engine = make_engine(model, runner="device")
    asked: list[int] = []

    def measure_next(most_rows: int) -> bool:
        asked.append(most_rows)
        return len(asked) < 3

    sampler = engine.runner.sampler
    sampler.kernels = replace(sampler.kernels, measure_next=measure_next)
    engine.submit(record("a", [1, 2], max_tokens=1))
    assert not engine.prepare() and not asked
    drain(engine)
    assert [engine.prepare() for _ in range(4)] == [True, True, False, False]
    assert set(asked) == {max(engine.runner.limits.max_rows, engine.runner.limits.max_tokens)}
    engine.close()


def test_without_a_device_there_is_nothing_to_prepare(model):
    engine = make_engine(model, runner="device")
    assert engine.prepare() is False
    engine.submit(record("a", [1, 2]))
    assert engine.prepare() is False
    engine.close()
