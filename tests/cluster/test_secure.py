"""The control channel between hosts: who is heard, who is not, and what can be read on the way."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq

from kilat.base.errors import ConfigError
from kilat.cluster.gateway.link import WorkerLinks
from kilat.cluster.worker.beat import SUFFIX
from kilat.cluster.worker.channel import Channel
from kilat.wire import codec
from kilat.wire.messages import Drain, Fatal, FromWorker, Ping, Status, ToWorker

pytestmark = pytest.mark.cluster

SECRET = "the secret of this test"
STATUS = Status(1, False, False, {}, {})


@asynccontextmanager
async def links(address: str = "tcp://127.0.0.1:*") -> AsyncIterator[tuple[WorkerLinks, list[FromWorker]]]:
    """A gateway's end that expects ``w``, and what it has heard."""
    made, heard = WorkerLinks(address, SECRET), []
    made.on_message = lambda worker_id, message: heard.append(message)
    made.open()
    made.expect("w")
    try:
        yield made, heard
    finally:
        made.close()


async def received(channel: Channel) -> list[ToWorker]:
    """What a worker gets within a while, which is as soon as there is something."""
    return await asyncio.to_thread(channel.receive, 10.0)


async def until_heard(heard: list[FromWorker], n: int) -> None:
    async with asyncio.timeout(10):
        while len(heard) < n:
            await asyncio.sleep(0.005)


async def test_worker_and_gateway_with_the_same_secret_hear_each_other_over_tcp() -> None:
    async with links() as (gateway, heard):
        worker = Channel(gateway.address, SECRET, "w")
        worker.send(Fatal("hello"))
        await until_heard(heard, 1)
        gateway.send("w", Ping())
        assert await received(worker) == [Ping()] and heard == [Fatal("hello")]
        worker.close()


async def test_worker_with_another_secret_cannot_even_connect() -> None:
    async with links() as (gateway, heard):
        stranger, worker = Channel(gateway.address, "another", "w"), Channel(gateway.address, SECRET, "w")
        stranger.send(Fatal("let me in"))
        worker.send(Fatal("it is me"))
        await until_heard(heard, 1)
        assert heard == [Fatal("it is me")]
        stranger.close()
        worker.close()


async def test_client_without_encryption_is_not_heard_though_it_knows_the_secret() -> None:
    async with links() as (gateway, heard):
        with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
            plain.setsockopt(zmq.IDENTITY, b"w")
            plain.setsockopt(zmq.LINGER, 0)
            plain.connect(gateway.address)
            plain.send_multipart((SECRET.encode(), codec.encode(Fatal("in the clear"))))
            worker = Channel(gateway.address, SECRET, "w")
            worker.send(Fatal("it is me"))
            await until_heard(heard, 1)
            assert heard == [Fatal("it is me")]
            worker.close()


async def test_nothing_of_a_message_can_be_read_on_the_way() -> None:
    async with links() as (gateway, heard):
        host, port = gateway.address.removeprefix("tcp://").split(":")
        seen = bytearray()

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65536):
                seen.extend(data)
                writer.write(data)
            writer.close()

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection(host, int(port))
            await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

        proxy = await asyncio.start_server(between, "127.0.0.1", 0)
        worker = Channel(f"tcp://127.0.0.1:{proxy.sockets[0].getsockname()[1]}", SECRET, "w")
        worker.send(Fatal("a word that would be seen"))
        await until_heard(heard, 1)
        assert len(seen) > 200 and b"would be seen" not in seen and SECRET.encode() not in seen
        worker.close()
        proxy.close()


async def test_worker_that_is_not_expected_any_more_is_told_to_end() -> None:
    async with links() as (gateway, heard):
        worker, beat = (
            Channel(gateway.address, SECRET, "w"),
            Channel(gateway.address, SECRET, "w", suffix=SUFFIX),
        )
        worker.send(STATUS)
        await until_heard(heard, 1)
        gateway.forget("w")
        beat.send(STATUS)
        assert await received(worker) == [Drain(0.0)] and len(heard) == 1
        worker.close()
        beat.close()


async def test_address_that_is_not_of_this_host_is_refused_with_it() -> None:
    with pytest.raises(ConfigError, match=r"tcp://192\.0\.2\.77"):
        async with links("tcp://192.0.2.77:*"):
            pass


async def test_worker_knows_when_the_gateway_is_another_one() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as false:
        false.setsockopt(zmq.LINGER, 0)
        false.curve_server = True
        false.curve_publickey, false.curve_secretkey = zmq.curve_keypair()
        false.bind(f"tcp://127.0.0.1:{port}")
        worker = Channel(f"tcp://127.0.0.1:{port}", SECRET, "w")
        worker.send(Fatal("a secret"))
        assert not await asyncio.to_thread(false.poll, 300)
        worker.close()
