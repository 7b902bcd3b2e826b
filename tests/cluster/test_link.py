"""The sockets between gateway and workers, with everybody who should not be on them."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from kilat.base.errors import CapacityError, LimitError, PeerError
from kilat.cluster.gateway.fleet import Fleet
from kilat.cluster.gateway.link import WorkerLinks
from kilat.cluster.gateway.placing import DispatchConfig
from kilat.cluster.gateway.sessions import Inbox
from kilat.cluster.gateway.workers import WorkerState
from kilat.cluster.worker.channel import Channel
from kilat.policy.route.router import Router
from kilat.wire import PROTOCOL_VERSION, codec
from kilat.wire.messages import Abort, Drain, Fatal, Hello, Refused, SessionEvent, Status, StepEvents, Submit
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SessionRecord
from tests.cluster.fault_worker import cut

pytestmark = pytest.mark.cluster

SECRET = "the secret of this test"
RECORD = SessionRecord(session_id="s", prompt_ids=[1], params=SamplingParams(seed=1))
PAIR = SessionRecord(session_id="s", prompt_ids=[1], params=SamplingParams(seed=1, n=2))


def hello(worker_id: str, protocol: int = PROTOCOL_VERSION) -> Hello:
    return Hello(
        worker_id=worker_id,
        model_id="m",
        max_model_len=10,
        max_num_seqs=1,
        vocab_size=5,
        page_tokens=4,
        n_pages=2,
        eos_ids=[0],
        kernels="k",
        protocol=protocol,
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def quiet() -> None:
    """Long enough for a frame on a local socket to have been read if it was going to be."""
    await asyncio.sleep(0.15)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[zmq.Socket, Channel]]:
    """A gateway's socket that has heard the hello of a worker, and the worker's channel."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    address = f"ipc://{tmp_path}/gateway"
    router.bind(address)
    channel = Channel(address, SECRET, "w")
    channel.send(hello("w"))
    assert router.poll(10_000) and router.recv_multipart()
    yield router, channel
    router.close(0)
    context.term()


def test_worker_that_loses_its_connection_is_told_so(pair: tuple[zmq.Socket, Channel]) -> None:
    router, channel = pair
    try:
        router.send_multipart((b"w", codec.encode(Drain(1.0))))
        assert channel.receive(10.0) == [Drain(1.0)]
        assert channel.receive(0.0) == []
        router.close(0)
        with pytest.raises(PeerError, match="lost"):
            channel.receive(10.0)
    finally:
        channel.close()


def test_nothing_of_a_worker_is_heard_that_it_says_after_its_connection_broke(
    pair: tuple[zmq.Socket, Channel],
) -> None:
    router, channel = pair
    try:
        assert cut(socket.AF_UNIX)  # a message that was on its way would be lost now
        assert not router.poll(20)  # before a second connection it learns that the first is over
        channel.send(StepEvents(2, []))
        with pytest.raises(PeerError, match="lost"):
            channel.receive(10.0)
    finally:
        channel.close()
    assert not router.poll(500)


class Link:
    """A fleet with one worker, as the tests below look at it."""

    def __init__(self, folder: Path) -> None:
        self.links = WorkerLinks(f"ipc://{folder}/gateway", SECRET)
        self.fleet = Fleet(self.links, Router(), DispatchConfig())
        self.worker: WorkerState | None = None

    def expect(self, worker_id: str) -> None:
        self.worker = self.fleet.expect(worker_id, "worker-0", (1.0, 1.0))

    @property
    def ready(self) -> bool:
        return self.fleet.ready

    @property
    def status(self) -> Status | None:
        return self.worker.status if self.worker is not None else None

    @property
    def hello(self) -> Hello | None:
        return self.fleet.hello


@asynccontextmanager
async def link_to(folder: Path, worker_id: str = "w1") -> AsyncIterator[Link]:
    link = Link(folder)
    link.links.open()
    link.expect(worker_id)
    try:
        yield link
    finally:
        link.fleet.close(PeerError("the server stopped"))


@pytest.fixture
def channels(tmp_path: Path) -> "Callable[..., Channel]":
    made: list[Channel] = []

    def make(worker_id: str = "w1", secret: str = SECRET, suffix: str = "") -> Channel:
        made.append(Channel(f"ipc://{tmp_path}/gateway", secret, worker_id, suffix=suffix))
        return made[-1]

    yield make
    for channel in made:
        channel.close()


Make = Callable[..., Channel]


async def test_hello_makes_the_link_ready_and_messages_go_both_ways(tmp_path: Path, channels: Make) -> None:
    async with link_to(tmp_path) as link:
        seen: list[Hello] = []
        link.fleet.on_ready = seen.append
        worker = channels()
        worker.send(hello("w1"))
        await until(lambda: link.ready)
        assert seen == [link.hello]
        inbox = Inbox()
        link.fleet.submit(RECORD, inbox, 0)
        link.fleet.ask_to_end(link.worker, 3.0)
        got = worker.receive(5) + worker.receive(0.2)
        assert got == [Submit(RECORD), Drain(3.0)]
        worker.send(StepEvents(1, [SessionEvent("s", 0, 0, [7], finish="stop")]))
        items = await asyncio.wait_for(inbox.take(), 5)
        assert items[0][1].token_ids == [7]


async def test_wrong_secret_is_dropped_and_counted(tmp_path: Path, channels: Make) -> None:
    async with link_to(tmp_path) as link:
        channels(secret="a guess").send(hello("w1"))
        await until(lambda: link.links.bad_frames == 1)
        assert not link.ready


async def test_other_worker_with_the_right_secret_is_not_listened_to(tmp_path: Path, channels: Make) -> None:
    async with link_to(tmp_path, "w2") as link:
        channels("w1").send(hello("w1"))
        await quiet()
        assert not link.ready
        channels("w2").send(hello("w2"))
        await until(lambda: link.ready)


async def test_dead_workers_last_events_reach_nobody(tmp_path: Path, channels: Make) -> None:
    async with link_to(tmp_path) as link:
        old = channels("w1")
        old.send(hello("w1"))
        await until(lambda: link.ready)
        inbox = Inbox()
        link.fleet.submit(RECORD, inbox, 0)
        link.fleet.lost("w1", PeerError("it died"))
        link.expect("w2")
        new = channels("w2")
        new.send(hello("w2"))
        await until(lambda: link.ready)
        again = Inbox()
        link.fleet.submit(RECORD, again, 0)
        old.send(StepEvents(1, [SessionEvent("s", 0, 0, [7])]))
        await quiet()
        with pytest.raises(PeerError, match="it died"):
            await asyncio.wait_for(inbox.take(), 5)
        new.send(StepEvents(1, [SessionEvent("s", 0, 0, [8])]))
        items = await asyncio.wait_for(again.take(), 5)
        assert [e.token_ids for _, e in items] == [[8]]


async def test_garbage_is_counted_and_the_link_goes_on(tmp_path: Path, channels: Make) -> None:
    async with link_to(tmp_path) as link:
        worker = channels()
        worker.send(hello("w1"))
        await until(lambda: link.ready)
        raw = worker._socket
        key = SECRET.encode()
        good = codec.encode(hello("w1"))
        garbage = [
            (b"",),
            (key,),
            (key, b""),
            (key, b"\xff" * 50),
            (key, good[:-3]),
            (key, good + b"x"),
            (key, codec.encode(Submit(RECORD))),
            (key, good, b"a third part"),
            (good,),
            (b"\x00" * 1000, good),
        ]
        for parts in garbage:
            raw.send_multipart(parts)
        await until(lambda: link.links.bad_frames == len(garbage))
        worker.send(Status(5, False, False, {}, {}))
        await until(lambda: link.status is not None and link.status.step == 5)


async def test_unknown_protocol_is_not_served(tmp_path: Path, channels: Make) -> None:
    async with link_to(tmp_path) as link:
        channels().send(hello("w1", protocol=PROTOCOL_VERSION + 1))
        await until(lambda: link.worker.fatal is not None)
        assert not link.ready


async def test_nothing_can_be_submitted_before_hello_or_while_the_worker_drains(
    tmp_path: Path, channels: Make
) -> None:
    async with link_to(tmp_path) as link:
        with pytest.raises(CapacityError) as e:
            link.fleet.submit(RECORD, Inbox(), 0)
        assert e.value.status == 503
        worker = channels()
        worker.send(hello("w1"))
        worker.send(Status(0, False, True, {}, {}))
        await until(lambda: link.status is not None)
        with pytest.raises(CapacityError):
            link.fleet.submit(RECORD, Inbox(), 0)
        assert len(link.fleet.table) == 0


async def test_beats_of_the_worker_arrive_on_their_own_socket(tmp_path: Path, channels: Make) -> None:
    async with link_to(tmp_path) as link:
        channels().send(hello("w1"))
        channels(suffix=".beat").send(Status(3, True, False, {}, {}))
        await until(lambda: link.status is not None and link.hello is not None)
        channels("w9", suffix=".beat").send(Status(99, True, False, {}, {}))
        await quiet()
        assert link.status is not None and link.status.step == 3


async def test_refusal_becomes_the_error_it_was(tmp_path: Path, channels: Make) -> None:
    async with link_to(tmp_path) as link:
        worker = channels()
        worker.send(hello("w1"))
        await until(lambda: link.ready)
        inbox = Inbox()
        link.fleet.submit(RECORD, inbox, 0)
        worker.send(Refused("s", "too long", "limit_exceeded", 400, False, "prompt"))
        with pytest.raises(LimitError, match="too long") as e:
            await asyncio.wait_for(inbox.take(), 5)
        assert (e.value.status, e.value.param) == (400, "prompt")


async def test_last_words_are_kept(tmp_path: Path, channels: Make) -> None:
    async with link_to(tmp_path) as link:
        channels().send(Fatal("no weights"))
        await until(lambda: link.worker.fatal == "no weights")


async def test_release_stops_what_runs_and_says_nothing_about_what_ended(
    tmp_path: Path, channels: Make
) -> None:
    async with link_to(tmp_path) as link:
        worker = channels()
        worker.send(hello("w1"))
        await until(lambda: link.ready)
        inbox = Inbox()
        link.fleet.submit(PAIR, inbox, 0)
        assert len(worker.receive(5)) == 1
        worker.send(StepEvents(1, [SessionEvent("s", 0, 0, [1], finish="stop")]))
        await until(lambda: "s" not in link.fleet.table)
        link.fleet.stop_sample("s", 1, 2)
        link.fleet.release(["s"], 2)
        link.fleet.release(["s"], 2)
        assert worker.receive(5) + worker.receive(0.2) == [Abort(["s#1"])]


async def test_sample_zero_of_many_is_stopped_alone(tmp_path: Path, channels: Make) -> None:
    async with link_to(tmp_path) as link:
        worker = channels()
        worker.send(hello("w1"))
        await until(lambda: link.ready)
        link.fleet.submit(PAIR, Inbox(), 0)
        link.fleet.stop_sample("s", 0, 2)
        assert (worker.receive(5) + worker.receive(0.2))[1:] == [Abort(["s#0"])]
        assert "s#1" in link.fleet.table


async def test_frame_over_the_size_limit_breaks_that_connection_only(tmp_path: Path, channels: Make) -> None:
    async with link_to(tmp_path) as link:
        liar = zmq.Context.instance().socket(zmq.DEALER)
        liar.setsockopt(zmq.LINGER, 0)
        liar.connect(link.links.address)
        liar.send_multipart((SECRET.encode(), b"\0" * (codec.MAX_FRAME_BYTES + 1)))
        channels().send(hello("w1"))
        await until(lambda: link.ready)
        liar.close()
