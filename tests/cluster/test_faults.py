"""Workers that come to harm at each moment of a request's life: nothing is wrong, lost, doubled or left over."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_model import TinyFiles

from tests.cluster import fault_run
from tests.cluster.fault_run import MOMENTS, Trials
from tests.policy.sched.fakes import VOCAB

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory, tiny: TinyFiles) -> Iterator[Trials]:
    folder: Path = tmp_path_factory.mktemp("faults")
    oracle = fault_run.plain(folder / "plain", tiny.path, real=False)
    server = fault_run.start(folder / "many", tiny.path, real=False)
    made = Trials(server, oracle, vocab=VOCAB, seed=3)
    yield made
    made.close()
    server.stop()
    oracle.stop()


@pytest.mark.parametrize("moment", MOMENTS)
def test_worker_that_is_killed_costs_no_token_and_no_page(trials: Trials, moment: str) -> None:
    out = trials.run("kill", moment, 2)
    assert out.hits == 2
    assert out.is_good, out.notes


@pytest.mark.parametrize(
    ("how", "moment"), [("stop", "mid_prompt"), ("stop", "decoding"), ("link", "decoding"), ("link", "told")]
)
def test_worker_that_stops_or_is_cut_off_costs_no_token_and_no_page(
    trials: Trials, how: str, moment: str
) -> None:
    out = trials.run(how, moment, 1)
    assert out.hits == 1 and out.retries >= 1
    assert out.is_good, out.notes
