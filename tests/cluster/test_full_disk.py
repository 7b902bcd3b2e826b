"""Workers whose disk cache has no room left, in real processes: the pages that are not there are computed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_disk import NoSmallDisk, small_disk
from tiny_model import TinyFiles

from tests.cluster import fault_run
from tests.cluster.fault_run import Trials
from tests.policy.sched.fakes import VOCAB

pytestmark = pytest.mark.cluster

KIB = 512
"""Four workers' tables and some hundred blocks of 4 KiB; what the trials below evict is more."""


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    try:
        with small_disk(tmp_path / "disk", KIB) as folder:
            yield folder
    except NoSmallDisk as e:
        pytest.skip(f"no file system can be mounted here: {e}")


def test_full_disk_costs_no_token_and_no_page_also_when_workers_are_killed(
    full_disk: Path, tmp_path: Path, tiny: TinyFiles
) -> None:
    options: dict[str, Any] = {"disk_cache_gb": 0.01, "disk_cache_dir": str(full_disk)}
    oracle = fault_run.plain(tmp_path / "plain", tiny.path, real=False)
    server = fault_run.start(tmp_path / "many", tiny.path, real=False, fake=fault_run.TIERED, **options)
    trials = Trials(server, oracle, vocab=VOCAB, seed=5)
    try:
        for moment in ("mid_prompt", "adopted"):
            out = trials.run("kill", moment, 2)
            assert out.hits == 2
            assert out.is_good, out.notes
        assert "is off from now on: No space left on device" in server.log()
    finally:
        trials.close()
        server.stop()
        oracle.stop()
