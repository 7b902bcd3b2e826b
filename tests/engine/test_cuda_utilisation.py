"""A tiny model on a CUDA device, watched under torch's profiler."""

import time

import pytest
import torch

from kilat.engine.device_trace import CudaTrace
from kilat.engine.roofs import measure_roofs
from kilat.engine.timeline import COMMIT, INPUTS, READ_BACK, SCHEDULE
from kilat.engine.utilisation import BETWEEN, UNKNOWN
from kilat.engine.watch import watch_steps
from kilat.ops.kernels import triton_set
from tests.engine.harness import drain, make_engine, record, run, tiny_model

pytestmark = pytest.mark.gpu

SPIN_CYCLES = 20_000_000
"""Some 10 ms of a kernel that does nothing."""


@pytest.fixture(scope="module")
def device():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


@pytest.fixture(scope="module")
def model(device):
    torch.manual_seed(0)
    wide = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256, "max_position_embeddings": 512}
    return tiny_model("llama", triton_set("test", exact=True), device=device, dtype=torch.bfloat16, **wide)


def jobs():
    return [record(f"s{i}", [i, 5, 6], max_tokens=60, ignore_eos=True) for i in range(8)]


def test_kernel_lies_within_the_time_of_its_launch_and_its_wait_on_the_hosts_clock(device):
    trace = CudaTrace()
    trace.start()
    times = []
    for _ in range(3):
        begin = time.time_ns()
        torch.cuda._sleep(SPIN_CYCLES)
        torch.cuda.synchronize()
        times.append((begin, time.time_ns()))
    spins = [s for s in trace.stop() if not s.copy and s.end_ns - s.begin_ns > 1_000_000]
    assert len(spins) == 3
    slack = 50_000  # of the two clocks
    for spin, (begin, end) in zip(sorted(spins, key=lambda s: s.begin_ns), times):
        assert begin - slack <= spin.begin_ns < spin.end_ns <= end + slack
        assert spin.queued_ns is not None and begin - slack <= spin.queued_ns <= end + slack


@pytest.mark.parametrize("depth", [1, 2])
def test_busy_time_and_named_gaps_cover_a_window_of_steps(model, device, depth):
    engine = make_engine(model, page_tokens=16, runner="device", depth=depth)
    expected = run(engine, jobs())  # compiles and captures
    for job in jobs():
        engine.submit(job)
    first = engine.step_count
    watch = watch_steps(engine, lambda: 16 if engine.step_count >= first + 8 else 0)
    drain(engine)
    roofs = measure_roofs(device, torch.bfloat16, 1)
    assert roofs.copy_bytes_per_s > 1e11 and roofs.product_flops_per_s > 1e13
    found = watch.finish(roofs)
    assert found.note is None and found.busy == "kernels" and found.steps == 16 and found.rows == 8.0
    assert 0 < found.busy_share <= 1
    assert found.busy_share + sum(g.share for g in found.gaps) == pytest.approx(1.0)
    names = {g.name for g in found.gaps}
    assert UNKNOWN not in names and BETWEEN in names
    if depth == 1:
        # this model's kernels take microseconds: the host is what a step waits for
        assert names & {SCHEDULE, INPUTS, COMMIT, READ_BACK}
    assert found.kernels and all(k.ms > 0 and 0 < k.share <= 1 for k in found.kernels)
    assert 0 < found.bandwidth_share < 1 and 0 < found.arithmetic_share < 1
    assert run(engine, jobs()) == expected, "a watched engine goes on as before"
    engine.close()


def test_memory_of_the_measured_roofs_is_given_back(device):
    torch.cuda.synchronize()
    measure_roofs(device, torch.bfloat16, 1)
    before = torch.cuda.memory_reserved(device)
    measure_roofs(device, torch.bfloat16, 1)
    assert torch.cuda.memory_reserved(device) <= before
