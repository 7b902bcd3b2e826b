"""The Python binding: what it gives, what it refuses, and that a session can be put away and taken up again."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from kilat.base.errors import ConfigError, EngineError, LimitError, ModelFileError, RequestError
from kilat.native import library
from kilat.native.runtime import NativeModel, Sampling
from kilat.ops.cpu import build as building
from tests.native import checkpoints, twins

pytestmark = [pytest.mark.cpu]
PROMPT = [1, 2, 3, 250]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory, runtime):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return checkpoints.write_gguf(path, "llama", {"": "Q8_0"})


@pytest.fixture(scope="module")
def model(gguf):
    with NativeModel(gguf, threads=2) as opened:
        yield opened


def test_info_is_of_the_file(model):
    info = model.info
    assert (info.architecture, info.layers, info.hidden, info.vocab) == ("llama", 2, 256, checkpoints.VOCAB)
    assert info.end_ids == (checkpoints.VOCAB - 1,) and info.bos_id is None and info.weights == "stored"
    assert info.file_bytes < info.parameters * 1.2


def test_session_goes_on_from_a_snapshot_as_if_it_had_not_stopped(model):
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=4)
    with model.session(64) as whole, model.session(48) as resumed:
        expected = twins.native_ids(whole, PROMPT, 20, sampling)
        whole.rewind(0)
        ids = [whole.prefill(PROMPT, sampling)]
        ids += [whole.step(ids[-1], sampling) for _ in range(1)]
        resumed.restore(whole.snapshot())
        assert resumed.n_tokens == len(PROMPT) + 1 and resumed.sample(sampling) == ids[-1]
        while len(ids) < 20:
            ids.append(resumed.step(ids[-1], sampling))
    assert ids == expected


def test_snapshot_of_another_model_is_refused_and_leaves_an_empty_session(model, tmp_path):
    other = checkpoints.write_gguf(tmp_path / "other.gguf", "llama", {"": "Q4_0"})
    with NativeModel(other) as foreign, foreign.session(32) as theirs, model.session(32) as ours:
        theirs.prefill(PROMPT)
        ours.prefill(PROMPT)
        with pytest.raises(EngineError, match="another model"):
            ours.restore(theirs.snapshot())
        assert ours.n_tokens == 0


def test_a_session_that_may_run_ahead_gives_the_ids_of_one_that_may_not(model):
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=4)
    with model.session(64) as plain, model.session(64, run_ahead=True) as ahead:
        assert twins.native_ids(ahead, PROMPT, 20, sampling) == twins.native_ids(plain, PROMPT, 20, sampling)
        assert ahead.snapshot() == plain.snapshot()


def test_tokens_past_the_context_are_refused_and_the_session_stays(model):
    with model.session(8) as session:
        session.prefill(PROMPT)
        with pytest.raises(LimitError, match="context of 8"):
            session.prefill([1] * 5)
        assert session.n_tokens == 4 and session.step(5, Sampling()) is not None


def test_wrong_ids_and_parameters_are_refused(model):
    with model.session(8) as session:
        for ids in ([], [checkpoints.VOCAB], [-1]):
            with pytest.raises(RequestError):
                session.prefill(ids)
        for sampling in (
            Sampling(temperature=-1.0),
            Sampling(top_p=0.0),
            Sampling(min_p=2.0),
            Sampling(top_k=-1),
        ):
            with pytest.raises(RequestError, match="out of range"):
                session.step(1, sampling)
        with pytest.raises(EngineError, match="no logits"):
            session.logits()
        assert session.n_tokens == 0


def test_context_longer_than_the_model_is_refused(model):
    with pytest.raises(RequestError, match="allowed 1 to 512"):
        model.session(513)


def test_sessions_in_several_threads_do_not_disturb_each_other(model):
    found: dict[int, list[int]] = {}

    def stream(k: int) -> None:
        with model.session(64) as session:
            found[k] = twins.native_ids(session, [*PROMPT, k], 20, Sampling(temperature=1.0, seed=k))

    threads = [threading.Thread(target=stream, args=(k,)) for k in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    together = dict(found)
    for k in range(3):
        stream(k)
    assert len(together) == 3 and together == found


def test_layers_are_kept_only_where_asked_for(model):
    with model.session(16) as session:
        session.prefill(PROMPT)
        with pytest.raises(RequestError, match="KILAT_KEEP_LAYERS"):
            session.layers()
    with model.session(16, keep_layers=True) as session:
        session.prefill(PROMPT)
        kept = session.layers()
        assert kept.shape == (3, 256) and np.isfinite(kept).all()


def test_damaged_file_and_missing_file_say_what_is_wrong(gguf, tmp_path, runtime):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf.read_bytes()[:-5000])
    with pytest.raises(ModelFileError, match="cut short or damaged"):
        NativeModel(cut)
    with pytest.raises(ModelFileError, match="cannot open"):
        NativeModel(tmp_path / "nothing.gguf")
    with pytest.raises(ConfigError, match="weights is 'odd'"):
        NativeModel(gguf, weights="odd")


def test_model_of_another_architecture_is_refused_by_name(gguf, tmp_path, runtime):
    other = tmp_path / "other.gguf"
    other.write_bytes(gguf.read_bytes().replace(b"llama", b"lamma"))
    with pytest.raises(ConfigError, match=r"'lamma'; supported: llama"):
        NativeModel(other)


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(building, "compiler", lambda: None)
    monkeypatch.setenv("KILAT_CACHE_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler.*install"):
        library.load()


def tasks() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no processor masks")
def test_helpers_have_a_processor_each_where_there_are_as_many_threads_as_processors(gguf):
    allowed = os.sched_getaffinity(0)
    for threads in (len(allowed), len(allowed) + 1):
        before = tasks()
        with NativeModel(gguf, threads=threads):
            masks = [os.sched_getaffinity(task) for task in tasks() - before]
        assert len(masks) == threads - 1
        if threads == len(allowed):
            taken = set().union(*masks) if masks else set()
            assert all(len(mask) == 1 for mask in masks) and len(taken) == len(masks)
        else:
            assert all(mask == allowed for mask in masks)
    assert os.sched_getaffinity(0) == allowed
