"""Steps of a real engine, watched: with a trace that is made up, and on the CPU, where the forward calls count."""

import time
from dataclasses import dataclass, field

import pytest
import torch
from torch.autograd import DeviceType

from kilat.engine.device_trace import clock_shift, to_spans
from kilat.engine.roofs import measure_roofs
from kilat.engine.timeline import CALLER, COMMIT, INPUTS, NO_REQUESTS, SAMPLING, SCHEDULE
from kilat.engine.utilisation import Roofs, Span
from kilat.engine.watch import LEAD, NO_KERNELS, TOO_SHORT, StepWatch, watch_steps
from tests.engine.harness import drain, make_engine, outputs, record, tiny_model

pytestmark = pytest.mark.cpu

ROOFS = Roofs(1e9, 1e12, "float32 1024^3")
MS = 1_000_000


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def jobs(n=4, tokens=40):
    return [record(f"s{i}", [i, 7, 9], max_tokens=tokens, ignore_eos=True) for i in range(n)]


def start(model, **options):
    engine = make_engine(model, **options)
    for job in jobs():
        engine.submit(job)
    return engine


@dataclass
class FakeTrace:
    """A device that runs a kernel of ``busy_ns`` every ``every_ns`` from the start of the trace until its end."""

    every_ns: int = 2 * MS
    busy_ns: int = MS
    begin_ns: int = 0
    steps_at: list[int] = field(default_factory=list)
    engine: object = None

    def start(self):
        self.steps_at.append(self.engine.step_count)
        self.begin_ns = time.time_ns()

    def stop(self):
        self.steps_at.append(self.engine.step_count)
        begins = range(self.begin_ns, time.time_ns() + self.every_ns, self.every_ns)
        return [Span(t, t + self.busy_ns, f"kernel {i % 2}") for i, t in enumerate(begins)]


class BlindTrace(FakeTrace):
    def stop(self):
        return []


def watched(engine, trace, n=6):
    trace.engine = engine
    return StepWatch(engine, lambda: n if engine.step_count >= 5 else 0, trace)


def test_trace_covers_so_many_steps_after_those_that_are_timed(model):
    engine, trace = start(model), FakeTrace()
    watch = watched(engine, trace)
    while not watch.done:
        engine.step()
        time.sleep(0.003)  # so that the made-up kernels are of the order of a step
    assert trace.steps_at == [5 + 6, 5 + 6 + LEAD + 6]
    found = watch.finish(ROOFS)
    assert (found.steps, found.rows, found.tokens, found.busy, found.device) == (
        6,
        4.0,
        4.0,
        "kernels",
        "cpu",
    )
    assert found.busy_share == pytest.approx(0.5, abs=0.2)
    assert found.busy_share + sum(g.share for g in found.gaps) == pytest.approx(1.0)
    assert {g.name for g in found.gaps} & {CALLER, INPUTS, COMMIT, SCHEDULE}
    assert found.step_ms >= 3 and found.watched_step_ms >= 3
    assert {k.name for k in found.kernels} == {"kernel 0", "kernel 1"}


def test_watched_engine_gives_the_same_ids_and_is_left_alone_after(model):
    plain = outputs(drain(start(model)))
    engine = start(model)
    watch = watched(engine, FakeTrace())
    assert outputs(drain(engine)) == plain and watch.done
    n_marks = len(watch._marks)
    engine.submit(record("more", [1]))
    drain(engine)
    assert len(watch._marks) == n_marks


def test_bytes_and_operations_are_those_of_the_plans(model):
    engine = start(model)
    watch = watched(engine, FakeTrace(), n=2)
    found = []
    launched = watch.launching
    watch.launching = lambda plan: (
        found.append(plan) if watch._stage.name == "STEPS" else None,
        launched(plan),
    )
    drain(engine)
    work = [engine.info.work.step(p.rows) for p in found]
    u = watch.finish(ROOFS)
    assert len(work) == 2 and u.read_bytes == sum(w.read_bytes for w in work) / 2
    assert u.flops == sum(w.flops for w in work) / 2
    # the second of the steps looks at one more key a row than the first: rows x layers x bytes of a token
    assert work[1].read_bytes - work[0].read_bytes == 4 * len(model.layers) * engine.info.work.kv_bytes


def test_work_that_ends_first_is_reported_with_the_steps_that_there_were(model):
    engine, trace = start(model), FakeTrace()
    watch = watched(engine, trace, n=30)
    drain(engine)
    assert not watch.done and len(trace.steps_at) == 1
    found = watch.finish(ROOFS)
    assert found.steps == 30 and found.busy_share is not None and len(trace.steps_at) == 2
    engine = start(model)
    watch = watched(engine, FakeTrace(), n=300)
    drain(engine)
    found = watch.finish(ROOFS)
    assert 30 < found.steps < 40 and watch.done
    assert (found.busy_share, found.note) == (None, TOO_SHORT)


def test_work_that_ends_before_the_window_gives_nothing(model):
    engine = make_engine(model)
    watch = StepWatch(engine, lambda: 0, None)
    engine.submit(record("a", [1]))
    drain(engine)
    assert watch.finish(ROOFS) is None and watch.done


def test_device_without_a_kernel_gives_a_reason(model):
    engine = start(model)
    watch = watched(engine, BlindTrace())
    drain(engine)
    found = watch.finish(ROOFS)
    assert (found.busy_share, found.gaps, found.note) == (None, [], NO_KERNELS)
    assert found.bandwidth_share > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_on_the_cpu_forward_calls_are_the_busy_time(model, depth):
    engine = start(model, depth=depth)
    before = engine.runner.model_s
    watch = watch_steps(engine, lambda: 8 if engine.step_count >= 5 else 0)
    while not watch.done:
        engine.step()
    found = watch.finish(ROOFS)
    assert (found.steps, found.busy, found.device) == (8, "forward calls", "cpu")
    assert found.watched_step_ms == pytest.approx(found.step_ms)
    assert found.busy_share + sum(g.share for g in found.gaps) == pytest.approx(1.0)
    [calls] = found.kernels
    assert calls.n == pytest.approx(1.0, abs=0.2) and calls.share == pytest.approx(found.busy_share)
    assert 0 < calls.ms * 8e-3 <= engine.runner.model_s - before
    if depth == 1:
        assert {SAMPLING, INPUTS, SCHEDULE, COMMIT} <= {g.name for g in found.gaps}
    engine.close()


def test_time_without_a_request_is_named_so(model):
    engine = make_engine(model)
    watch = StepWatch(engine, lambda: 30, FakeTrace(engine=engine))
    for k in range(3):
        engine.submit(record(f"s{k}", [1], max_tokens=12, ignore_eos=True))
        while engine.has_work:
            engine.step()
        time.sleep(0.02)
    while not watch.done:
        engine.submit(record(f"t{engine.step_count}", [1], max_tokens=4, ignore_eos=True))
        while engine.has_work:
            engine.step()
        time.sleep(0.02)
    shares = {g.name: g.share for g in watch.finish(ROOFS).gaps}
    assert shares[NO_REQUESTS] > shares.get(CALLER, 0.0)


@dataclass
class Event:
    """An event as torch's profiler tells it."""

    kind: DeviceType
    label: str
    begin: int
    ns: int
    id: int = 0

    def name(self):
        return self.label

    def start_ns(self):
        return self.begin

    def duration_ns(self):
        return self.ns

    def device_type(self):
        return self.kind

    def correlation_id(self):
        return self.id


def test_launches_copies_and_another_clock_are_read_from_the_profilers_events():
    cpu, cuda = DeviceType.CPU, DeviceType.CUDA
    events = [
        Event(cpu, "cudaDeviceSynchronize", 1000, 20, 1),
        Event(cpu, "cudaDeviceSynchronize", 1030, 10, 2),
        Event(cpu, "cudaGraphLaunch", 1100, 15, 7),
        Event(cuda, "gemm", 1120, 50, 7),
        Event(cuda, "norm", 1172, 8, 7),
        Event(cuda, "Memcpy DtoH (Device -> Pinned)", 1185, 2, 8),
    ]
    assert to_spans(events, (1025, 1045)) == [
        Span(1120, 1170, "gemm", 1115),
        Span(1172, 1180, "norm", 1115),
        Span(1185, 1187, "Memcpy DtoH (Device -> Pinned)", None, copy=True),
    ]
    moved = to_spans(events, (5025, 5045))
    assert (moved[0].begin_ns, moved[0].queued_ns) == (1120 + 3995, 1115 + 3995)


def test_clocks_are_shifted_by_no_more_than_needed():
    assert clock_shift([(10, 20)], (5, 25)) == 0
    assert clock_shift([(10, 20), (100, 110)], (13, 40)) == 3
    assert clock_shift([(10, 20)], (0, 18)) == -2
    assert clock_shift([], (0, 18)) == 0


def test_roofs_are_measured_and_the_number_of_threads_is_put_back():
    before = torch.get_num_threads()
    roofs = measure_roofs(torch.device("cpu"), torch.float32, before + 1)
    assert roofs.copy_bytes_per_s > 1e8 and roofs.product_flops_per_s > 1e8
    assert roofs.product == "float32 1024^3" and torch.get_num_threads() == before
