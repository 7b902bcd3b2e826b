"""NIXL owners in other processes that die, stop and reuse their pages. With ``UCX_TLS=tcp`` in the environment nothing is copied by the
system from memory to memory, which is how it is between hosts."""

import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

from tests.kv.conftest import End
from tests.kv.pools import Owner, color, make_offer, wait

pytestmark = pytest.mark.cluster

MakeEnd = Callable[..., End]
MakeOwner = Callable[..., Owner]
BIG = 1 << 20


def read(e: End, pages: list[int], limit_s: float = 20.0, move: str = "m0") -> int:
    return e.transport.read(make_offer(pages, move=move), range(len(pages)), range(len(pages)), limit_s)


@pytest.fixture
def pair(end: MakeEnd, owner: MakeOwner) -> Callable[..., tuple[Owner, End]]:
    def make(n: int = 8, page_bytes: int = 4096) -> tuple[Owner, End]:
        e = end("nixl", n, page_bytes)
        o = owner("--nixl", "--pages", str(n), "--page-bytes", str(page_bytes))
        e.pages.memory[:] = 0
        e.transport.connect("a", o.endpoints["nixl"])
        return o, e

    return make


def test_pages_of_another_process_arrive_until_they_are_withdrawn(
    pair: Callable[..., tuple[Owner, End]],
) -> None:
    o, e = pair()
    o.tell("open", "m0", [1, 2, 3])
    read(e, [1, 2, 3])
    assert wait(e.transport)[0].ok
    assert np.array_equal(e.pages.memory[2], color(3, 4096))
    o.tell("shut", "m0")
    read(e, [1, 2, 3])
    assert not wait(e.transport)[0].ok


def test_reused_pages_are_never_handed_out(pair: Callable[..., tuple[Owner, End]]) -> None:
    o, e = pair(2, 1 << 18)
    n_ok = n_late = 0
    for k in range(100):
        o.tell("flash", k, k % 10 * 0.001)
        e.transport.read(make_offer([0], move=f"c{k}"), [0], [1], 5.0)
        (done,) = wait(e.transport)
        n_ok, n_late = n_ok + done.ok, n_late + (not done.ok)
        assert not done.ok or np.array_equal(e.pages.memory[1], color(k, 1 << 18))
    assert n_ok
    assert n_late


def test_killed_owner_fails_the_read(pair: Callable[..., tuple[Owner, End]]) -> None:
    o, e = pair(64, BIG)
    o.tell("open", "m0", list(range(64)))
    read(e, [1])
    assert wait(e.transport)[0].ok
    read(e, list(range(64)))
    o.signal(signal.SIGKILL)
    wait(e.transport)  # it may have been in time
    began_s = time.monotonic()
    for _ in range(2):
        read(e, [1])
        assert not wait(e.transport)[0].ok
    assert time.monotonic() - began_s < 15


def test_stopped_owner_fails_the_read_at_the_deadline_and_nothing_comes_late(
    pair: Callable[..., tuple[Owner, End]], end: MakeEnd, owner: MakeOwner
) -> None:
    o, e = pair(32, BIG)
    fine = owner("--nixl", "--pages", "32", "--page-bytes", str(BIG))
    fine.tell("open", "m1", [1])
    e.transport.connect("b", fine.endpoints["nixl"])
    o.tell("open", "m0", list(range(32)))
    read(e, [1])
    assert wait(e.transport)[0].ok
    o.signal(signal.SIGSTOP)
    stopped = read(e, list(range(32)), 1.0)
    other = e.transport.read(make_offer([1], move="m1", owner="b"), [0], [31], 20.0)
    done = {d.ticket: d for d in wait(e.transport, 2)}
    assert done[other].ok  # it is not held up
    e.pages.memory[:31] = 7  # somebody else has the pages now
    o.signal(signal.SIGCONT)
    o.tell("open", "m2", [5])
    if not done[stopped].ok:  # memory of a process of this host can be read without its help
        time.sleep(0.5)
        assert (e.pages.memory[:31] == 7).all()
    read(e, [5], move="m2")
    assert wait(e.transport)[0].ok
    assert np.array_equal(e.pages.memory[0], color(5, BIG))
