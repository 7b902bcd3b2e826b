"""Pages over TCP against peers that lie, babble or fall silent."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec
import numpy as np
import pytest

from kilat.base.errors import PeerError
from kilat.kv import tcp_server
from kilat.kv.checksum import page_checksum
from kilat.kv.tcp import TcpAddress
from kilat.kv.tcp_frames import MAGIC, MAX_FRAME_BYTES, Ask, Reply, Wire, framed
from kilat.kv.transport import layout_digest
from kilat.wire.kv import Endpoint
from tests.kv.conftest import End
from tests.kv.pools import SECRET, color, make_layout, make_offer, wait

pytestmark = pytest.mark.logic

LIFE = b"n" * 16
LAYOUT = layout_digest(make_layout(4096))
Make = Callable[..., End]


def soon() -> Callable[[], float]:
    until_s = time.monotonic() + 5.0
    return lambda: until_s - time.monotonic()


@contextmanager
def fake_server(talk: Callable[[Wire], None]) -> Iterator[Endpoint]:
    """A server that knows the secret, and after the handshake does what ``talk`` says, once for each connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                wire = Wire(listener.accept()[0])
            except OSError:
                return
            try:
                wire.greet(SECRET.encode(), LIFE, LAYOUT, soon())
                wire.receive_ask(soon())
                talk(wire)
            except PeerError:
                pass
            finally:
                wire.close()

    thread = threading.Thread(target=serve)
    thread.start()
    address = TcpAddress("127.0.0.1", listener.getsockname()[1], LIFE, LAYOUT)
    try:
        yield Endpoint("tcp", msgspec.msgpack.encode(address))
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def read_two(end: Make, talk: Callable[[Wire], None], limit_s: float = 5.0) -> str:
    """Why a read of two pages from such a server failed."""
    e = end("tcp")
    with fake_server(talk) as endpoint:
        e.transport.connect("a", endpoint)
        e.transport.read(make_offer([1, 2]), [0, 1], [0, 1], limit_s)
        (done,) = wait(e.transport)
        e.transport.close()
    assert not done.ok
    return done.why


def test_page_that_was_damaged_on_the_way_fails_the_read(end: Make) -> None:
    why = read_two(end, lambda w: w.send([framed(Reply(True, [0, 0])), bytes(8192)], soon()))
    assert "checksum" in why


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (framed(Reply(True, [0, 0, 0])), "another number"),
        (framed(Reply(True, [])), "another number"),
        (framed(Reply(False, why="not today")), "not today"),
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "little"), "limit"),
        (b"\x03\x00\x00\x00\xc1\xc1\xc1", "could not be read"),
        (framed(Reply(True, [0, 0])) + bytes(5000), "closed"),
        (b"\x01", "closed"),
    ],
)
def test_answer_that_makes_no_sense_fails_the_read(end: Make, sent: bytes, why: str) -> None:
    assert why in read_two(end, lambda w: w.send([sent], soon()))


def test_server_that_falls_silent_fails_the_read_at_the_deadline(end: Make) -> None:
    assert "deadline" in read_two(end, lambda w: time.sleep(0.5), limit_s=0.2)


def test_idle_connection_that_was_closed_is_made_again(end: Make) -> None:
    """The server answers one read for each connection and hangs up."""
    page = color(7, 4096).tobytes()

    def talk(w: Wire) -> None:
        w.send([framed(Reply(True, [page_checksum(color(7, 4096))])), page, framed(Reply(True))], soon())

    e = end("tcp")
    with fake_server(talk) as endpoint:
        e.transport.connect("a", endpoint)
        for into in range(3):
            e.transport.read(make_offer([1]), [0], [into], 5.0)
            assert wait(e.transport)[0].ok
            assert np.array_equal(e.pages.memory[into], color(7, 4096))
        e.transport.close()


def dial(e: End) -> tuple[socket.socket, TcpAddress]:
    address = msgspec.msgpack.decode(e.transport.endpoint().address, type=TcpAddress)
    return socket.create_connection((address.host, address.port), timeout=10), address


def asked_for_all(end: Make) -> tuple[End, Wire]:
    """A server of 64 pages of 1 MiB, and a client that has asked for them all as move ``m0``."""
    e = end("tcp", 64, 1 << 20)
    e.board.open("m0", range(64))
    sock, address = dial(e)
    wire = Wire(sock)
    wire.meet(SECRET.encode(), address.nonce, address.layout, soon())
    wire.send([framed(Ask("m0", list(range(64))))], soon())
    return e, wire


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(100), MAGIC + bytes(32 + 32)])
def test_stranger_is_hung_up_on_and_learns_nothing(end: Make, words: bytes) -> None:
    e = end("tcp")
    e.board.open("m0", [1])
    sock, _ = dial(e)
    sock.sendall(words)
    got = b""
    with suppress(OSError):  # it may have hung up by now, on bytes that it never read: a reset
        sock.shutdown(socket.SHUT_WR)
    try:
        while chunk := sock.recv(4096):
            got += chunk
    except ConnectionResetError:
        pass
    sock.close()
    assert len(got) == len(MAGIC) + 32  # the greeting, and no more
    assert end("tcp").transport.poll() == []


def test_stranger_that_says_nothing_is_hung_up_on(end: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "HANDSHAKE_S", 0.1)
    sock, _ = dial(end("tcp"))
    with sock:
        assert len(sock.recv(4096)) == len(MAGIC) + 32
        assert sock.recv(4096) == b""


def test_client_with_the_secret_gets_offered_pages_only(end: Make) -> None:
    e = end("tcp")
    e.board.open("m0", [1, 2])
    sock, address = dial(e)
    wire = Wire(sock)
    wire.meet(SECRET.encode(), address.nonce, address.layout, soon())
    for pages in ([3], [1, 3], [8], [-1]):
        wire.send([framed(Ask("m0", pages))], soon())
        assert not wire.receive_reply(soon()).ok
    wire.send([framed(Ask("m0", [2]))], soon())
    assert wire.receive_reply(soon()).ok
    got = bytearray(4096)
    wire.receive([memoryview(got)], soon())
    assert got == color(2, 4096).tobytes()
    assert wire.receive_reply(soon()) == Reply(True)
    wire.close()


def test_connections_are_bounded(end: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "MAX_CONNECTIONS", 2)
    e = end("tcp")
    first, second = dial(e)[0], dial(e)[0]
    assert first.recv(10)
    assert second.recv(10)
    third, _ = dial(e)
    assert third.recv(10) == b""
    first.close()
    for sock in (second, third):
        sock.close()


def test_client_that_takes_nothing_is_dropped(end: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "STALL_S", 0.2)
    _, wire = asked_for_all(end)
    until_s = time.monotonic() + 10
    while any(t.name == "kv-tcp-serve" for t in threading.enumerate()):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    wire.close()


def test_server_that_closes_while_a_client_reads_ends_its_threads(end: Make) -> None:
    e, wire = asked_for_all(end)
    assert wire.receive_reply(soon()).ok
    e.transport.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("kv-tcp")]
    wire.close()


def test_pages_withdrawn_while_they_are_sent_are_not_sent_to_the_end(end: Make) -> None:
    e, wire = asked_for_all(end)
    n_pages = 0
    while (reply := wire.receive_reply(soon())).ok:
        assert reply.checksums, "the read ended as if all were well"
        for checksum in reply.checksums:
            page = bytearray(1 << 20)
            wire.receive([memoryview(page)], soon())
            assert page_checksum(np.frombuffer(page, np.uint8)) == checksum
            n_pages += 1
        e.board.shut("m0")
    assert n_pages < 64
    wire.close()
