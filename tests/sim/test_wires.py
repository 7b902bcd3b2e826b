"""What the simulated wires and processes promise, with a gateway that only listens."""

import random

import pytest

from kilat.policy.sched.config import SchedulerConfig
from kilat.sim.cluster import Cluster
from kilat.sim.faults import Fault, Faults, Weather, draw_faults
from kilat.sim.worker import WorkerShape
from kilat.wire import messages as wire
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SessionRecord
from tests.sim.mover import make_mover, virtual_time

pytestmark = pytest.mark.logic

SHAPE = WorkerShape(
    SchedulerConfig(n_pages=32, page_tokens=4, max_model_len=64, max_num_seqs=4, max_step_tokens=16)
)


class Ear:
    """A ``Control`` that writes down what it hears and sends what it is told to."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, str, wire.FromWorker]] = []
        self.gone: list[tuple[float, str]] = []
        self.expected: list[str] = []
        self.answers: list[tuple[str, wire.ToWorker]] = []

    def expect(self, worker_id, name, weights, now_s):
        self.expected.append(worker_id)

    def lost(self, worker_id, now_s):
        self.gone.append((now_s, worker_id))
        return []

    def on_message(self, worker_id, message, now_s):
        self.heard.append((now_s, worker_id, message))
        return []

    def submit(self, record, now_s):
        return [("w.0", wire.Submit(record))]

    def cancel(self, session_id, n, now_s):
        return [("w.0", wire.Abort([session_id]))]

    def tick(self, now_s):
        answers, self.answers = self.answers, []
        return answers

    def tokens(self) -> list[int]:
        return [
            e.seq for _, _, m in self.heard if isinstance(m, wire.StepEvents) for e in m.events if e.token_ids
        ]


def run(faults: Faults, seconds: float = 3.0, seed: int = 0) -> tuple[Cluster, Ear]:
    ear = Ear()
    cluster = Cluster(ear, SHAPE, {"w": (1.0, 1.0)}, faults, random.Random(seed), make_mover)
    params = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)
    cluster.request(0.3, SessionRecord("ses-0", [1, 2, 3], params))
    with virtual_time(cluster.agenda):
        cluster.agenda.run(seconds)
    return cluster, ear


def test_messages_of_one_link_keep_their_order_whatever_the_delay():
    _, ear = run(Faults(Weather(delay_s=(0.0, 0.2))))
    assert ear.tokens() == list(range(20))
    assert isinstance(ear.heard[0][2], wire.Hello)


def test_best_effort_messages_get_lost_and_the_others_do_not():
    _, ear = run(Faults(Weather(lose=1.0)))
    assert ear.tokens() == list(range(20))
    assert {type(m) for _, _, m in ear.heard} == {wire.Hello, wire.StepEvents}


def overtaken(ear: Ear) -> bool:
    """Whether a status was heard after the news of a step that came after it."""
    last = -1
    for _, _, m in ear.heard:
        if isinstance(m, wire.StepEvents):
            last = m.step
        elif isinstance(m, wire.Status) and m.step < last:
            return True
    return False


def test_best_effort_messages_may_go_astray_and_be_overtaken():
    calm = [run(Faults(), seed=seed)[1] for seed in range(8)]
    windy = [run(Faults(Weather(stray=0.7)), seed=seed)[1] for seed in range(8)]
    assert not any(map(overtaken, calm))
    assert any(map(overtaken, windy))
    assert all(ear.tokens() == list(range(20)) for ear in windy)


def test_a_broken_connection_is_a_lost_worker_that_nothing_is_heard_of_any_more():
    cluster, ear = run(Faults(Weather(cut=0.2)), seconds=5.0)
    at_s, worker_id = ear.gone[0]
    assert worker_id == "w.0"
    assert not [t for t, w, _ in ear.heard if w == worker_id and t > at_s]
    assert len(ear.expected) == cluster.n_restarts + 1 > 1


def test_a_crashed_worker_is_missed_and_started_again_under_a_new_id():
    cluster, ear = run(Faults(by_worker={"w.0": Fault(edge=12)}))
    assert [w for _, w in ear.gone] == ["w.0"]
    assert ear.expected == ["w.0", "w.1"]
    assert cluster.n_restarts == 1 and cluster.workers["w"].alive
    assert len(ear.tokens()) < 20


def test_a_short_pause_only_makes_it_late():
    _, calm = run(Faults())
    _, ear = run(Faults(by_worker={"w.0": Fault(edge=12, freeze_s=0.5)}))
    assert not ear.gone and ear.tokens() == list(range(20))
    assert max(t for t, _, m in ear.heard if isinstance(m, wire.StepEvents)) > 0.4 + max(
        t for t, _, m in calm.heard if isinstance(m, wire.StepEvents)
    )


def test_a_worker_that_stands_still_too_long_is_taken_for_dead_and_ended():
    cluster, ear = run(Faults(by_worker={"w.0": Fault(edge=12, freeze_s=30.0)}), seconds=40.0)
    assert [w for _, w in ear.gone] == ["w.0"]
    assert cluster.workers["w"].worker_id == "w.1"


def test_an_old_epoch_given_away_again_is_noticed():
    cluster, ear = run(Faults())
    record = cluster.requests["ses-0"]
    ear.answers = [("w.0", wire.Submit(record))]
    with virtual_time(cluster.agenda):
        cluster.agenda.run(4.0)
    assert cluster.broken == ["ses-0: given away with epoch 0 after 0"]


def test_drawn_faults_are_of_all_kinds():
    drawn = [draw_faults(random.Random(seed), ["a", "b"]) for seed in range(200)]
    ends = [f for d in drawn for f in d.by_worker.values()]
    assert any(f.freeze_s is None for f in ends) and any(f.freeze_s is not None for f in ends)
    assert any(not d.by_worker for d in drawn)
    for kind in ("lose", "cut", "stray"):
        assert {bool(getattr(d.weather, kind)) for d in drawn} == {True, False}
