"""Owners in other processes that die, stop, lie or are somebody else."""

import os
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from kilat.base.errors import PeerError
from kilat.kv.shm import ShmAddress
from kilat.kv.tcp import TcpAddress
from kilat.wire.kv import Endpoint
from tests.kv.conftest import End
from tests.kv.pools import LIMIT_S, Owner, color, make_offer, wait

pytestmark = pytest.mark.cluster

KINDS = ["shm", "tcp"]
MakeEnd = Callable[..., End]
MakeOwner = Callable[..., Owner]
# The server asks its board before each batch of 256 pages and once after the last: 700 pages are asked for four times.
PHASES = {"before the first byte": 1, "between batches": 2, "before the last word": 4}
BIG = ("--pages", "700", "--page-bytes", "4096")


def reader(end: MakeEnd, owner: Owner, kind: str, n: int = 8) -> End:
    e = end(kind, n, 4096)
    e.pages.memory[:] = 0
    e.transport.connect("a", owner.endpoints[kind])
    return e


def read(e: End, pages: range | list[int], limit_s: float = 10.0, move: str = "m0") -> int:
    return e.transport.read(make_offer(list(pages), move=move), range(len(pages)), range(len(pages)), limit_s)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_another_process_arrive(end: MakeEnd, owner: MakeOwner, kind: str) -> None:
    o = owner()
    e = reader(end, o, kind)
    o.tell("open", "m0", [1, 2, 3])
    read(e, [1, 2, 3])
    assert wait(e.transport)[0].ok
    assert np.array_equal(e.pages.memory[2], color(3, 4096))
    o.tell("shut", "m0")
    read(e, [1, 2, 3])
    assert not wait(e.transport)[0].ok


@pytest.mark.parametrize("kind", KINDS)
def test_reused_pages_of_another_process_are_never_handed_out(
    end: MakeEnd, owner: MakeOwner, kind: str
) -> None:
    o = owner("--page-bytes", str(1 << 18))
    e = end(kind, 2, 1 << 18)
    e.transport.connect("a", o.endpoints[kind])
    n_ok = n_late = 0
    for k in range(200):
        o.tell("flash", k, k % 10 * 0.0005)
        e.transport.read(make_offer([0], move=f"c{k}"), [0], [1], 5.0)
        (done,) = wait(e.transport)
        n_ok, n_late = n_ok + done.ok, n_late + (not done.ok)
        assert not done.ok or np.array_equal(e.pages.memory[1], color(k, 1 << 18))
    assert n_ok
    assert n_late


@pytest.mark.parametrize("phase", PHASES)
def test_killed_owner_fails_the_read_over_tcp_at_once(end: MakeEnd, owner: MakeOwner, phase: str) -> None:
    o = owner(*BIG, "--die", str(PHASES[phase]), str(int(signal.SIGKILL)))
    e = reader(end, o, "tcp", 700)
    o.tell("open", "m0", list(range(700)))
    began_s = time.monotonic()
    read(e, range(700))
    (done,) = wait(e.transport)
    assert not done.ok
    assert "closed" in done.why or "broke" in done.why
    assert time.monotonic() - began_s < 5
    read(e, range(700))  # and the next one, with nobody there
    assert not wait(e.transport)[0].ok


@pytest.mark.parametrize("phase", PHASES)
def test_stopped_owner_fails_the_read_over_tcp_at_the_deadline(
    end: MakeEnd, owner: MakeOwner, phase: str
) -> None:
    o = owner(*BIG, "--die", str(PHASES[phase]), str(int(signal.SIGSTOP)))
    e = reader(end, o, "tcp", 700)
    o.tell("open", "m0", list(range(700)))
    read(e, range(700), 0.5)
    (done,) = wait(e.transport)
    assert (done.ok, done.why) == (False, "the deadline has passed")
    before = e.pages.memory.copy()
    o.signal(signal.SIGCONT)
    o.tell("open", "m1", [5])
    assert np.array_equal(e.pages.memory, before)  # what comes late goes nowhere
    read(e, [5], move="m1")
    assert wait(e.transport)[0].ok
    assert np.array_equal(e.pages.memory[0], color(5, 4096))


def test_stopped_owner_does_not_hold_up_reads_from_others_over_tcp(end: MakeEnd, owner: MakeOwner) -> None:
    stopped, fine = owner(), owner()
    e = reader(end, stopped, "tcp")
    e.transport.connect("b", fine.endpoints["tcp"])
    fine.tell("open", "m1", [1])
    stopped.signal(signal.SIGSTOP)
    read(e, [1], 10.0)
    ticket = e.transport.read(make_offer([1], move="m1", owner="b"), [0], [0], 10.0)
    (done,) = wait(e.transport)
    assert (done.ticket, done.ok) == (ticket, True)


def test_cancel_ends_a_read_from_a_stopped_owner_over_tcp(end: MakeEnd, owner: MakeOwner) -> None:
    o = owner()
    e = reader(end, o, "tcp")
    o.signal(signal.SIGSTOP)
    began_s = time.monotonic()
    e.transport.cancel(read(e, [1], 60.0))
    assert not wait(e.transport)[0].ok
    assert time.monotonic() - began_s < 5


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_mapped_pages_of_a_stopped_or_dead_owner_are_still_right(
    end: MakeEnd, owner: MakeOwner, number: signal.Signals
) -> None:
    o = owner()
    e = reader(end, o, "shm")
    o.tell("open", "m0", [1, 2, 3])
    o.signal(number)
    read(e, [1, 2, 3])
    assert wait(e.transport)[0].ok
    assert all(np.array_equal(e.pages.memory[i], color(i + 1, 4096)) for i in range(3))
    e.transport.forget("a")
    read(e, [1, 2, 3])
    assert not wait(e.transport)[0].ok


def test_pages_of_a_forgotten_owner_are_given_back_behind_the_callers_thread(
    end: MakeEnd, owner: MakeOwner
) -> None:
    e = reader(end, owner(), "shm")
    given_back = queue.SimpleQueue()
    weakref.finalize(
        e.transport._peers["a"].memory, lambda: given_back.put((threading.current_thread().name, nice()))
    )
    before = nice()
    e.transport.forget("a")
    assert given_back.get(timeout=LIMIT_S) == ("kv-unmap", 19)
    assert nice() == before


def nice() -> int:
    """Of this thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_dead_owner_cannot_be_mapped(end: MakeEnd, owner: MakeOwner) -> None:
    o = owner()
    o.signal(signal.SIGKILL)
    with pytest.raises(PeerError, match="cannot be mapped"):
        reader(end, o, "shm")


def test_process_that_got_the_number_of_a_dead_one_is_not_read(end: MakeEnd, owner: MakeOwner) -> None:
    """The other process is an owner too, with the same numbers of files: only its life is another."""
    dead, other = (
        msgspec.msgpack.decode(owner().endpoints["shm"].address, type=ShmAddress) for _ in range(2)
    )
    for forged in (
        msgspec.structs.replace(dead, pid=other.pid),
        msgspec.structs.replace(dead, pid=other.pid, inode=other.inode),
        msgspec.structs.replace(dead, host="another host"),
        msgspec.structs.replace(dead, n_pages=1000),
        msgspec.structs.replace(dead, pool_fd=0),
    ):
        with pytest.raises(PeerError):
            end("shm").transport.connect("a", Endpoint("shm", msgspec.msgpack.encode(forged)))


def test_server_that_got_the_port_of_a_dead_one_is_not_read(end: MakeEnd, owner: MakeOwner) -> None:
    o = owner()
    o.tell("open", "m0", [1])
    address = msgspec.msgpack.decode(o.endpoints["tcp"].address, type=TcpAddress)
    forged = msgspec.structs.replace(address, nonce=b"x" * 16)
    e = end("tcp")
    e.transport.connect("a", Endpoint("tcp", msgspec.msgpack.encode(forged)))
    read(e, [1])
    assert "handshake" in wait(e.transport)[0].why


def test_owner_with_another_secret_is_not_read(end: MakeEnd, owner: MakeOwner) -> None:
    o = owner("--secret", "a wrong one")
    o.tell("open", "m0", [1])
    e = reader(end, o, "tcp")
    read(e, [1])
    (done,) = wait(e.transport)
    assert "handshake" in done.why
    assert not e.pages.memory.any()


def test_owner_that_comes_again_under_its_old_name_is_read_after_connecting_anew(
    end: MakeEnd, owner: MakeOwner
) -> None:
    first = owner()
    e = reader(end, first, "tcp")
    first.tell("open", "m0", [1])
    read(e, [1])
    assert wait(e.transport)[0].ok
    first.signal(signal.SIGKILL)
    second = owner()
    second.tell("open", "m0", [1])
    e.transport.forget("a")
    e.transport.connect("a", second.endpoints["tcp"])
    read(e, [1])
    assert wait(e.transport)[0].ok


@pytest.mark.parametrize("kind", KINDS)
def test_reader_that_dies_leaves_the_owner_serving(end: MakeEnd, owner: MakeOwner, kind: str) -> None:
    o = owner()
    o.tell("open", "m0", [1])
    for _ in range(3):
        e = reader(end, o, kind)
        read(e, [1])
        assert wait(e.transport)[0].ok
        e.transport.close()
    o.tell("close")
    assert o.process.wait(10) == 0
