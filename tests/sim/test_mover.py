"""What a simulated gateway learns from the moves of simulated workers."""

from random import Random

import pytest

from kilat.base import metrics
from kilat.policy.sched.config import SchedulerConfig
from kilat.sim.cluster import Cluster
from kilat.sim.faults import Faults
from kilat.sim.model import StepCost
from kilat.sim.worker import WorkerShape
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SessionRecord
from tests.sim.gateway import Gateway
from tests.sim.mover import make_mover, virtual_time

pytestmark = pytest.mark.logic

PAGE_TOKENS = 16
N = 20


@pytest.mark.parametrize("page_s", [0.0, 0.004, 0.02])
def test_gateway_learns_from_moves_of_all_lengths_what_a_page_takes(page_s: float) -> None:
    config = SchedulerConfig(
        n_pages=400, page_tokens=PAGE_TOKENS, max_model_len=1000, max_num_seqs=8, max_step_tokens=256
    )
    shape = WorkerShape(config, StepCost(), page_move_s=page_s, content=False)
    control = Gateway()
    fleet = {"p0": (1.0, 0.0), "d0": (0.0, 1.0)}
    cluster = Cluster(control, shape, fleet, Faults(), Random(0), make_mover)
    params = SamplingParams(seed=0, max_tokens=20, ignore_eos=True)
    lengths = [150 + 37 * i for i in range(N)]
    for i, n in enumerate(lengths):
        cluster.request(0.5 + i, SessionRecord(f"ses-{i}", [i] * n, params))
    with virtual_time(cluster.agenda):
        cluster.agenda.run(0.5 + N + 5)
    n_pages = sum(-(-n // PAGE_TOKENS) for n in lengths)
    assert control.dispatcher.counts[metrics.MOVED_BYTES] == 4 * PAGE_TOKENS * n_pages
    assert control.router.link.page_move_s == pytest.approx(page_s, rel=0.2, abs=0.001)
