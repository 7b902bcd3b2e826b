"""The worker's loop over a channel that is a list: refusals, failures, drains."""

import threading
import time
from collections.abc import Sequence

import pytest
from fake_engine import FakeEngine, FakeSettings

from kilat.cluster.worker.beat import Pulse
from kilat.cluster.worker.loop import WorkerLoop
from kilat.wire.messages import (
    Abort,
    Drain,
    FromWorker,
    Hello,
    Ping,
    Refused,
    SessionEvent,
    Status,
    StepEvents,
    Submit,
    ToWorker,
)
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SessionRecord

pytestmark = pytest.mark.logic


class ListChannel:
    """Hands out one batch of messages per call, then lets the loop drain."""

    def __init__(self, batches: Sequence[Sequence[ToWorker]], *, drain_s: float = 5.0) -> None:
        self.batches = list(batches)
        self.sent: list[FromWorker] = []
        self._drain_s = drain_s

    def send(self, message: FromWorker) -> None:
        self.sent.append(message)

    def receive(self, timeout_s: float) -> list[ToWorker]:
        return list(self.batches.pop(0)) if self.batches else [Drain(self._drain_s)]


def record(text: str, session: str = "s", **params: object) -> SessionRecord:
    sampling = SamplingParams(**{"seed": 1, "max_tokens": 4, **params})  # type: ignore[arg-type]
    return SessionRecord(session_id=session, prompt_ids=list(text.encode()), params=sampling)


def run(batches: Sequence[Sequence[ToWorker]], *, drain_s: float = 5.0, **settings: object) -> ListChannel:
    channel = ListChannel(batches, drain_s=drain_s)
    engine = FakeEngine(FakeSettings(**settings))  # type: ignore[arg-type]
    WorkerLoop("w", engine, channel, Pulse()).run()  # type: ignore[arg-type]
    return channel


def events(channel: ListChannel, session: str = "s") -> list[SessionEvent]:
    steps = [m for m in channel.sent if isinstance(m, StepEvents)]
    return [e for m in steps for e in m.events if e.session_id == session]


def test_hello_comes_first_and_tells_the_engines_facts() -> None:
    hello = run([]).sent[0]
    assert isinstance(hello, Hello)
    assert (hello.worker_id, hello.model_id, hello.max_model_len, hello.vocab_size) == ("w", "fake", 512, 259)


def test_session_runs_to_its_end_before_a_drain_ends_the_loop() -> None:
    channel = run([[Submit(record("hello"))]])
    assert [e.seq for e in events(channel)] == [0, 1, 2, 3]
    assert events(channel)[-1].finish == "length"


def test_news_of_one_step_travel_in_one_frame() -> None:
    channel = run([[Submit(record("hello", "a")), Submit(record("you", "b"))]])
    frames = [m for m in channel.sent if isinstance(m, StepEvents)]
    assert [[e.session_id for e in m.events] for m in frames] == [["a", "b"]] * 4
    assert [m.step for m in frames] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("text", "code", "status"), [("refuse!", "limit_exceeded", 400), ("bug!", "internal_error", 500)]
)
def test_session_that_cannot_be_taken_is_refused_alone(text: str, code: str, status: int) -> None:
    channel = run([[Submit(record(text, "bad")), Submit(record("hello", "good"))]])
    refused = [m for m in channel.sent if isinstance(m, Refused)]
    assert [(r.session_id, r.code, r.status) for r in refused] == [("bad", code, status)]
    assert "ValueError" not in refused[0].message
    assert events(channel, "good")[-1].finish == "length"


def test_full_queue_refuses_with_429() -> None:
    channel = run([[Submit(record("a", f"s{k}")) for k in range(4)]], max_num_seqs=1, max_waiting=2)
    refused = [m for m in channel.sent if isinstance(m, Refused)]
    assert [(r.session_id, r.status, r.retryable) for r in refused] == [("s3", 429, True)]


def test_abort_ends_a_session_and_a_second_abort_is_nothing() -> None:
    channel = run([[Submit(record("hello", max_tokens=400))], [Abort(["s"])], [Abort(["s", "unknown"])]])
    assert [e.finish for e in events(channel)] == [None, "abort"]


def test_session_that_comes_during_a_drain_is_refused_with_503() -> None:
    channel = run([[Submit(record("hello"))], [Drain(5.0), Submit(record("late", "late"))]])
    refused = [m for m in channel.sent if isinstance(m, Refused)]
    assert [(r.session_id, r.status, r.retryable) for r in refused] == [("late", 503, True)]
    assert events(channel)[-1].finish == "length"


def test_drain_deadline_aborts_what_is_left() -> None:
    channel = run([[Submit(record("hello", max_tokens=400, n=2))], [Drain(0.0)]], step_s=0.01)
    assert events(channel)[-1].finish == "abort"
    assert events(channel, "s#1")[-1].finish == "abort"


def test_later_drain_can_only_bring_the_end_nearer() -> None:
    began_s = time.monotonic()
    run([[Submit(record("hello", max_tokens=400))], [Drain(0.2)], [Drain(1000.0)]], step_s=0.01)
    assert time.monotonic() - began_s < 10


def test_ping_is_answered_with_the_numbers_of_now() -> None:
    channel = run([[Submit(record("hello", max_tokens=3))], [Ping()]])
    _, status = [m for m in channel.sent if isinstance(m, Status)]
    assert status.step == 1
    assert status.busy
    assert status.gauges["kilat_sessions_running"] == 1


def test_error_in_a_step_ends_the_loop() -> None:
    with pytest.raises(RuntimeError, match="the step broke"):
        run([[Submit(record("crash!"))]])


def test_pulse_tells_the_age_of_a_step_from_another_thread() -> None:
    pulse = Pulse()
    channel = ListChannel([[Submit(record("hello", max_tokens=2))]])
    engine = FakeEngine(FakeSettings(step_s=0.5))
    loop = WorkerLoop("w", engine, channel, pulse)  # type: ignore[arg-type]
    thread = threading.Thread(target=loop.run)
    thread.start()
    ages = []
    deadline = time.monotonic() + 20
    while thread.is_alive() and time.monotonic() < deadline:
        ages.append(pulse.status().gauges["kilat_step_age_seconds"])
        time.sleep(0.01)
    thread.join(10)
    assert 0.2 < max(ages) < 5
    assert not pulse.busy
    assert pulse.step == 2
