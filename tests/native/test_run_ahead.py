"""Sessions that begin a step before its id has come back are, for whoever calls, sessions that do not; on an emulated device."""

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kilat.base.errors import EngineError, LimitError
from kilat.cli.main import main
from kilat.native.runtime import NativeModel, NativeSession, Sampling
from tests.native import checkpoints, cuda_table, twins

pytestmark = pytest.mark.cpu
PROMPT, OTHER = [1, 2, 3, 250], [9, 8, 7, 6, 5, 4, 3]
SAMPLED = Sampling(temperature=1.0, top_p=0.9, seed=4)
CONTEXT = 40


@pytest.fixture(scope="module")
def library() -> Path:
    if not shutil.which("g++"):
        pytest.skip("no g++")
    return cuda_table.build_library(emulated=True)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "llama", {"": "Q4_0"})


@pytest.fixture(scope="module")
def model(gguf: Path, library: Path):
    with NativeModel(gguf, device="cuda", library=library) as opened:
        yield opened


def launches(model: NativeModel) -> int:
    """Steps that the emulated device has run."""
    return ctypes.CDLL(model.library._name).kilat_emulated_launches()


def same(a: NativeSession, b: NativeSession) -> bool:
    return a.n_tokens == b.n_tokens and a.snapshot() == b.snapshot()


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_ids_are_the_same_and_one_step_is_run_for_nothing(model, sampling):
    with model.session(CONTEXT) as plain, model.session(CONTEXT, run_ahead=True) as ahead:
        before = launches(model)
        expected = twins.native_ids(plain, PROMPT, 12, sampling)
        between = launches(model)
        assert twins.native_ids(ahead, PROMPT, 12, sampling) == expected
        assert launches(model) - between == between - before + 1
        assert same(plain, ahead)


def test_a_step_is_begun_before_its_id_is_asked_for(model):
    with model.session(CONTEXT, run_ahead=True) as session:
        token = session.prefill(PROMPT, SAMPLED)
        before = launches(model)
        session.step(token, SAMPLED)
        assert launches(model) == before + 1  # of the next one
        session.step(OTHER[0], SAMPLED)
        assert launches(model) == before + 3  # of this one and the next


def test_a_stream_that_stopped_early_is_followed_by_another_prompt_as_if_nothing_had_been_begun(model):
    with model.session(CONTEXT) as fresh, model.session(CONTEXT, run_ahead=True) as session:
        expected = twins.native_ids(fresh, OTHER, 6, SAMPLED)
        twins.native_ids(session, PROMPT, 5, SAMPLED)  # its last id ends the text
        assert twins.native_ids(session, OTHER, 6, SAMPLED) == expected
        # the next turn of the same text, instead of the id that was drawn
        session.prefill(PROMPT, SAMPLED), fresh.prefill(PROMPT, SAMPLED)
        assert same(fresh, session)


def test_a_snapshot_after_a_stop_is_that_of_a_session_that_begins_nothing(model):
    with (
        model.session(CONTEXT) as plain,
        model.session(CONTEXT, run_ahead=True) as ahead,
        model.session(CONTEXT, run_ahead=True) as resumed,
    ):
        for session in (plain, ahead):
            ids = twins.native_ids(session, PROMPT, 5, SAMPLED)
        resumed.restore(ahead.snapshot())
        assert same(plain, ahead) and same(plain, resumed)
        assert np.array_equal(plain.logits(), ahead.logits())
        more = [session.step(ids[-1], SAMPLED) for session in (plain, ahead, resumed)]
        assert more[0] == more[1] == more[2] and same(plain, ahead) and same(plain, resumed)


def test_the_last_place_of_the_context_is_used_and_none_beyond(model):
    with model.session(8, run_ahead=True) as session, model.session(8) as plain:
        before = launches(model)
        ids = twins.native_ids(session, PROMPT, 5, SAMPLED)
        assert launches(model) - before == 5  # nothing is begun that has no place
        assert ids == twins.native_ids(plain, PROMPT, 5, SAMPLED) and session.n_tokens == 8
        with pytest.raises(LimitError, match="context of 8"):
            session.step(ids[-1], SAMPLED)
        assert same(plain, session)


def test_a_session_that_keeps_layers_begins_nothing(model):
    with model.session(CONTEXT, keep_layers=True, run_ahead=True) as session:
        before = launches(model)
        twins.native_ids(session, PROMPT, 4, SAMPLED)
        assert launches(model) - before == 4
        assert np.isfinite(session.layers()).all()


CALLS = (
    "own",
    "own",
    "own",
    "other id",
    "other sampling",
    "no draw",
    "prompt",
    "sample",
    "rewind",
    "restore",
)


def drawn_or_error(session: NativeSession, sampling: Sampling) -> int | str:
    try:
        return session.sample(sampling)
    except EngineError as error:  # there is nothing to draw from
        return error.message


# steps are slow here: no smaller failure is sought
@settings(max_examples=5, deadline=None, phases=[Phase.generate])
@given(st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 299)), min_size=4, max_size=14))
def test_whatever_is_called_between_steps_no_call_tells_a_session_that_runs_ahead(model, calls):
    with model.session(64) as plain, model.session(64, run_ahead=True) as ahead:
        both = (plain, ahead)
        saved, last = [s.snapshot() for s in both], [s.prefill(PROMPT, SAMPLED) for s in both]
        for call, number in calls:
            sampling = Sampling(0.8, seed=number) if call == "other sampling" else SAMPLED
            if call == "prompt":
                last = [s.prefill([number, 3, number], SAMPLED) for s in both]
            elif call == "sample":
                saved = [s.snapshot() for s in both]
                drawn = [drawn_or_error(s, Sampling(1.3, seed=number)) for s in both]
                assert drawn[0] == drawn[1]
            elif call == "rewind":
                plain.rewind(max(0, plain.n_tokens - number % 4)), ahead.rewind(plain.n_tokens)
            elif call == "restore":
                plain.restore(saved[0]), ahead.restore(saved[1])
            elif call == "no draw":
                plain.step(last[0]), ahead.step(last[1])
            else:
                tokens = (number, number) if call == "other id" else last
                last = [s.step(token, sampling) for s, token in zip(both, tokens)]
            assert last[0] == last[1] and same(plain, ahead)


def test_the_command_writes_the_text_of_plain_steps_and_begins_its_steps_early(model, gguf, library, capsys):
    with model.session(CONTEXT) as session:
        before = launches(model)
        ids = twins.native_ids(session, model.encode("two words"), 7, Sampling())
        plain = launches(model) - before
    command = [
        "native",
        str(gguf),
        "-p",
        "two words",
        "--max-tokens",
        "7",
        "--ignore-eos",
        "--device",
        "cuda",
    ]
    assert main([*command, "--library", str(library)]) == 0
    assert launches(model) - before == 2 * plain + 1
    text = b"".join(map(model.token_bytes, ids)).decode("utf-8", "replace")
    assert capsys.readouterr().out == text + "\n"
