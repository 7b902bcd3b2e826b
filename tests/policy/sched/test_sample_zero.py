"""Sample 0 has the request's own id, and can still be named alone."""

import pytest

from tests.policy.sched.fakes import Rig

pytestmark = pytest.mark.logic


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_of_sample_zero_leaves_the_other_samples_running(steps: int):
    rig = Rig()
    rig.submit("a", range(6), n=3, max_tokens=6)
    for _ in range(steps):
        rig.step()
    rig.abort("a#0")
    rig.run()
    assert rig.finish == {"a": "abort", "a#1": "length", "a#2": "length"}
