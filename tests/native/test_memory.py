"""The memory report is what the system shows, and nothing is allocated once a session is there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.native import checkpoints

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.usefixtures("runtime"),
    pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads memory use from /proc"),
]
PROBE = Path(__file__).with_name("memory_probe.py")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Large enough that two in a hundred are more than what a process needs by itself."""
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "vocab_size": 8000}
    folder = tmp_path_factory.mktemp("checkpoint")
    return checkpoints.save("llama", folder, torch.bfloat16, max_position_embeddings=1024, **shape)


def test_report_is_what_the_system_shows_and_steps_allocate_nothing(checkpoint):
    done = subprocess.run(
        [sys.executable, str(PROBE), str(checkpoint), "wide", "1024"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["reported"] > 60 << 20
    assert abs(seen["shown"] - seen["reported"]) <= 0.02 * seen["reported"], seen
    # the lists of ids that Python makes come and go; the library maps nothing
    assert seen["grown"] <= 256 << 10 and seen["mapped"] <= 256 << 10, seen
