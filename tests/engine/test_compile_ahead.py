"""Kernels compiled ahead: shares of the shapes, and processes that end by themselves, fail or are closed."""

import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from kilat.engine.compile_ahead import CompileAhead
from kilat.engine.compile_main import share
from kilat.engine.config import EngineConfig
from kilat.engine.graphs import likely_shapes

pytestmark = pytest.mark.cpu
SHAPE = Path(__file__).parents[2] / "bench" / "shapes" / "llama31-8b"


def config(path: Path = SHAPE) -> EngineConfig:
    return EngineConfig(str(path), "hf", "dummy", dummy_weights=True, max_model_len=2048)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_shares_hold_every_shape_once(count):
    shapes = list(likely_shapes(256, 8192, 16_384))
    shares = [share(shapes, i, count) for i in range(count)]
    assert Counter(s for one in shares for s in one) == Counter(shapes)
    assert all(shares)


def test_the_first_shape_is_the_first_of_its_share():
    shapes = list(likely_shapes(64, 2048, 2048))
    assert share(shapes, 0, 4)[0] == shapes[0]


def test_processes_that_cannot_compile_end_and_count_as_done(tmp_path):
    ahead = CompileAhead(config(tmp_path / "no such model"))
    assert not ahead.done
    ahead.start()
    deadline = time.monotonic() + 240
    while not ahead.done and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ahead.done


def test_closing_ends_the_processes(monkeypatch):
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr("kilat.engine.compile_ahead.subprocess.Popen", Recorded)
    ahead = CompileAhead(config())
    ahead.start()
    n = len(started)
    ahead.start()
    ahead.close()
    ahead.start()
    assert n > 0 and len(started) == n and all(p.poll() is not None for p in started) and ahead.done


def test_a_machine_without_room_for_processes_goes_on_without_them(monkeypatch):
    def full(*args, **kwargs):
        raise BlockingIOError("no more processes")

    monkeypatch.setattr("kilat.engine.compile_ahead.subprocess.Popen", full)
    ahead = CompileAhead(config())
    ahead.start()
    assert ahead.done
