"""A run of the simulated cluster out of one number: its shape, traffic and faults."""

import random

from kilat.policy.route.config import RouterConfig
from kilat.policy.scale.config import ScaleConfig
from kilat.policy.scale.roles import RoleScaler
from kilat.policy.sched.config import SchedulerConfig
from kilat.sim.cluster import Cluster
from kilat.sim.faults import Faults, draw_faults
from kilat.sim.model import VOCAB, StepCost
from kilat.sim.worker import WorkerShape
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SessionRecord
from tests.sim.gateway import Gateway
from tests.sim.mover import make_mover, virtual_time

START_S = 0.4
PAGE_TOKENS = 4
FLEETS = (
    {"p0": (1.0, 0.0), "d0": (0.0, 1.0)},
    {"p0": (1.0, 0.0), "d0": (0.0, 1.0), "d1": (0.0, 1.0)},
    {"p0": (1.0, 0.0), "p1": (1.0, 0.0), "d0": (0.0, 1.0)},
    {"w0": (1.0, 1.0), "w1": (1.0, 1.0)},
    {"p0": (1.0, 0.0), "m0": (0.5, 0.5), "d0": (0.0, 1.0)},
)


def shape(rng: random.Random) -> WorkerShape:
    config = SchedulerConfig(
        n_pages=rng.choice((12, 20, 64)),
        page_tokens=PAGE_TOKENS,
        max_model_len=48,
        max_num_seqs=rng.choice((2, 4, 8)),
        max_step_tokens=rng.choice((8, 16, 64)),
        max_waiting=rng.choice((2, 64)),
        depth=rng.choice((1, 2)),
    )
    return WorkerShape(
        config,
        StepCost(0.01, 0.0005, 0.0005),
        page_move_s=rng.choice((0.0, 0.002, 0.05)),
        owner_sends=rng.random() < 0.5,
    )


def record(rng: random.Random, i: int, stems: list[list[int]]) -> SessionRecord:
    """A request; its prompt begins like that of others."""
    prompt = [*rng.choice(stems), *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 8)))]
    params = SamplingParams(
        seed=rng.randrange(1000),
        n=rng.choice((1, 1, 1, 2)),
        max_tokens=rng.randint(1, 14),
        ignore_eos=rng.random() < 0.8,
    )
    return SessionRecord(f"ses-{i}", prompt, params, tenant=rng.choice("ab"))


def cluster(seed: int, faults: Faults | None = None) -> tuple[Cluster, float]:
    """A cluster with its traffic, and when that is over. ``faults`` None: drawn."""
    rng = random.Random(seed)
    weights = rng.choice(FLEETS)
    drawn = draw_faults(rng, list(weights))
    router = RouterConfig(
        dead_after_s=3.0,
        local_prompt_tokens=rng.choice((0, 4)),
        move_s=0.001,
        page_move_s=rng.choice((0.0002, 0.01)),
    )
    scaler = RoleScaler(ScaleConfig(0.05, 0.02, patience=1, cool_down_s=0.2)) if rng.random() < 0.3 else None
    control = Gateway(router=router, scaler=scaler, window_s=0.1)
    c = Cluster(control, shape(rng), weights, faults or drawn, rng, make_mover)
    stems = [[rng.randrange(VOCAB) for _ in range(rng.choice((0, 8, 24)))] for _ in range(2)]
    at_s = START_S
    gap_s = rng.choice((0.002, 0.03, 0.1))
    for i in range(rng.randint(2, 8)):
        cancel_s = rng.expovariate(1 / 0.1) if rng.random() < 0.2 else None
        c.request(at_s, record(rng, i, stems), cancel_s=cancel_s)
        at_s += rng.expovariate(1 / gap_s)
    if rng.random() < 0.2:
        c.retire(START_S + rng.expovariate(1 / 0.1), rng.choice(list(weights)))
    return c, at_s


def settle(c: Cluster, at_s: float) -> list[str]:
    """Run a cluster whose traffic ends at ``at_s`` to its end; returns what does not hold."""
    with virtual_time(c.agenda):
        return c.settle(at_s + 2.0)


def broken(seed: int, faults: Faults | None = None) -> list[str]:
    """What does not hold in the run of this seed; nothing when all is well."""
    return settle(*cluster(seed, faults))
