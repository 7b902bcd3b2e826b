"""What every transport promises, owner and reader in this process."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from kilat.base.errors import PeerError
from kilat.kv.checksum import page_checksum
from kilat.wire.kv import Endpoint
from tests.kv.conftest import End
from tests.kv.pools import color, make_offer, wait

pytestmark = pytest.mark.logic

KINDS = ["local", "shm", "tcp", "nixl"]
Make = Callable[..., End]


def pair(end: Make, kind: str, n: int = 8, page_bytes: int = 4096) -> tuple[End, End]:
    """An owner ``a`` and a reader that knows it; the reader's pages are blank."""
    a, b = end(kind, n, page_bytes), end(kind, n, page_bytes)
    b.pages.memory[:] = 0
    b.transport.connect("a", a.transport.endpoint())
    return a, b


@pytest.mark.parametrize("kind", KINDS)
def test_endpoint_says_its_kind(end: Make, kind: str) -> None:
    e = end(kind)
    assert e.transport.kind == e.transport.endpoint().transport == kind


@pytest.mark.parametrize("kind", KINDS)
def test_taken_pages_arrive_where_they_are_wanted_and_nothing_else_changes(end: Make, kind: str) -> None:
    a, b = pair(end, kind)
    a.board.open("m0", [5, 2, 3, 7])
    ticket = b.transport.read(make_offer([5, 2, 3, 7]), [0, 1, 2], [1, 4, 5], 5.0)
    (done,) = wait(b.transport)
    assert done == (ticket, True, 3 * 4096, "")
    want = np.zeros_like(b.pages.memory)
    want[1], want[4], want[5] = color(5, 4096), color(2, 4096), color(3, 4096)
    assert np.array_equal(b.pages.memory, want)


@pytest.mark.parametrize("kind", KINDS)
def test_owners_pages_are_not_touched(end: Make, kind: str) -> None:
    a, b = pair(end, kind)
    before = a.pages.memory.copy()
    a.board.open("m0", range(8))
    b.transport.read(make_offer(range(8)), range(8), range(8), 5.0)
    assert wait(b.transport)[0].ok
    assert np.array_equal(a.pages.memory, before)


@pytest.mark.parametrize("kind", KINDS)
def test_large_move_of_odd_pages_arrives_whole(end: Make, kind: str) -> None:
    a, b = pair(end, kind, 700, 8_200)
    order = np.random.default_rng(0).permutation(700).tolist()
    a.board.open("m0", order)
    b.transport.read(make_offer(order), range(700), list(reversed(range(700))), 10.0)
    (done,) = wait(b.transport)
    assert (done.ok, done.n_bytes) == (True, 700 * 8_200)
    assert all(np.array_equal(b.pages.memory[699 - i], color(p, 8_200)) for i, p in enumerate(order))


@pytest.mark.parametrize("kind", KINDS)
def test_many_reads_end_once_each(end: Make, kind: str) -> None:
    a, b = pair(end, kind)
    a.board.open("m0", range(8))
    tickets = [b.transport.read(make_offer(range(8)), [k % 8], [7 - k % 8], 5.0) for k in range(40)]
    done = wait(b.transport, 40)
    assert sorted(d.ticket for d in done) == sorted(tickets) == sorted(set(tickets))
    assert all(d.ok for d in done)
    assert b.transport.poll() == []


@pytest.mark.parametrize("kind", KINDS)
def test_read_of_nothing_succeeds(end: Make, kind: str) -> None:
    a, b = pair(end, kind)
    a.board.open("m0", [])
    b.transport.read(make_offer([]), [], [], 5.0)
    assert wait(b.transport)[0][1:] == (True, 0, "")


@pytest.mark.parametrize("kind", KINDS)
def test_two_owners_are_told_apart(end: Make, kind: str) -> None:
    a, b = pair(end, kind)
    c = end(kind)
    b.transport.connect("c", c.transport.endpoint())
    c.pages.memory[1] = color(99, 4096)
    a.board.open("m0", [1])
    c.board.open("m1", [1])
    b.transport.read(make_offer([1]), [0], [0], 5.0)
    b.transport.read(make_offer([1], move="m1", owner="c"), [0], [1], 5.0)
    assert all(d.ok for d in wait(b.transport, 2))
    assert np.array_equal(b.pages.memory[0], color(1, 4096))
    assert np.array_equal(b.pages.memory[1], color(99, 4096))


@pytest.mark.parametrize("kind", KINDS)
def test_pages_that_are_not_offered_any_more_are_not_read(end: Make, kind: str) -> None:
    a, b = pair(end, kind)
    a.board.open("m0", [1])
    a.board.shut("m0")
    b.transport.read(make_offer([1]), [0], [0], 5.0)
    (done,) = wait(b.transport)
    assert not done.ok
    assert "withdrawn" in done.why
    assert not b.pages.memory.any()


@pytest.mark.parametrize("kind", KINDS)
def test_read_never_hands_out_bytes_of_a_page_that_was_reused(end: Make, kind: str) -> None:
    """The owner offers one page over and over with other bytes, while the reader reads what may be over."""
    a, b = pair(end, kind, 2, 1 << 18)
    stop = threading.Event()
    seen: list[int] = [0]

    def own() -> None:
        k = 0
        while not stop.is_set():
            a.pages.memory[0] = color(k, 1 << 18)
            a.board.open(f"m{k}", [0])
            seen[0] = k
            time.sleep(0.0003 if k % 2 else 0.005)
            a.board.shut(f"m{k}")
            k += 1

    thread = threading.Thread(target=own)
    thread.start()
    n_ok = n_late = 0
    began_s = time.monotonic()
    try:
        while (age_s := time.monotonic() - began_s) < 0.4 or (age_s < 10 and not (n_ok and n_late)):
            k = seen[0]
            b.transport.read(make_offer([0], move=f"m{k}"), [0], [1], 5.0)
            (done,) = wait(b.transport)
            if done.ok:
                n_ok += 1
                assert np.array_equal(b.pages.memory[1], color(k, 1 << 18))
            else:
                n_late += 1
    finally:
        stop.set()
        thread.join(10)
    assert n_ok
    assert n_late


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_and_forgotten_owner_fails_the_read(end: Make, kind: str) -> None:
    a, b = pair(end, kind)
    a.board.open("m0", [1])
    b.transport.read(make_offer([1], owner="nobody"), [0], [0], 5.0)
    b.transport.forget("a")
    b.transport.forget("a")
    b.transport.read(make_offer([1]), [0], [0], 5.0)
    assert [d.ok for d in wait(b.transport, 2)] == [False, False]


@pytest.mark.parametrize("kind", KINDS)
def test_known_again_owner_is_read_again(end: Make, kind: str) -> None:
    a, b = pair(end, kind)
    a.board.open("m0", [1])
    b.transport.forget("a")
    b.transport.connect("a", a.transport.endpoint())
    b.transport.connect("a", a.transport.endpoint())
    b.transport.read(make_offer([1]), [0], [0], 5.0)
    assert wait(b.transport)[0].ok


@pytest.mark.parametrize("kind", KINDS)
def test_other_layout_is_refused_at_connect(end: Make, kind: str) -> None:
    a, b = end(kind, model="other"), end(kind)
    with pytest.raises(PeerError, match="another layout"):
        b.transport.connect("a", a.transport.endpoint())
    b.transport.read(make_offer([1]), [0], [0], 5.0)
    assert not wait(b.transport)[0].ok


@pytest.mark.parametrize("kind", KINDS)
def test_address_that_makes_no_sense_is_refused(end: Make, kind: str) -> None:
    b = end(kind)
    with pytest.raises(PeerError):
        b.transport.connect("a", Endpoint(kind, b"\xff nonsense"))


@pytest.mark.parametrize("kind", KINDS)
def test_deadline_that_has_passed_fails_the_read(end: Make, kind: str) -> None:
    a, b = pair(end, kind)
    a.board.open("m0", [1])
    b.transport.read(make_offer([1]), [0], [0], 0.0)
    (done,) = wait(b.transport)
    assert (done.ok, done.why) == (False, "the deadline has passed")


@pytest.mark.parametrize("kind", KINDS)
def test_cancelled_read_ends_and_later_reads_go_on(end: Make, kind: str) -> None:
    a, b = pair(end, kind, 64, 1 << 20)
    a.board.open("m0", range(64))
    first = b.transport.read(make_offer(range(64)), range(64), range(64), 20.0)
    second = b.transport.read(make_offer(range(64)), range(64), range(64), 20.0)
    third = b.transport.read(make_offer(range(64)), [1], [0], 20.0)
    b.transport.cancel(second)
    b.transport.cancel(12345)
    done = {d.ticket: d for d in wait(b.transport, 3)}
    assert done[first].ok
    assert (done[second].ok, done[second].why) == (False, "cancelled")
    assert done[third].ok
    assert np.array_equal(b.pages.memory[0], color(1, 1 << 20))
    b.transport.cancel(first)  # it is over


@pytest.mark.parametrize("kind", KINDS)
def test_checksums_of_an_offer_are_verified(end: Make, kind: str) -> None:
    a, b = pair(end, kind)
    a.board.open("m0", [1, 2])
    sums = [page_checksum(color(p, 4096)) for p in (1, 2)]
    b.transport.read(make_offer([1, 2], checksums=sums), [1], [0], 5.0)
    assert wait(b.transport)[0].ok
    a.pages.memory[2, 77] ^= 1
    b.transport.read(make_offer([1, 2], checksums=sums), [1], [0], 5.0)
    (done,) = wait(b.transport)
    assert not done.ok
    assert "checksum" in done.why


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("pages", "take", "into", "sums"),
    [
        ([1], [1], [0], []),
        ([1], [0], [8], []),
        ([1], [0], [-1], []),
        ([1], [0, 0], [0], []),
        ([99], [0], [0], []),
        ([-1], [0], [0], []),
        ([1, 2], [0], [0], [7]),
    ],
)
def test_numbers_that_make_no_sense_fail_the_read_alone(
    end: Make, kind: str, pages: list[int], take: list[int], into: list[int], sums: list[int]
) -> None:
    a, b = pair(end, kind)
    a.board.open("m0", pages)
    a.board.open("m1", [1])
    b.transport.read(make_offer(pages, checksums=sums), take, into, 5.0)
    assert not wait(b.transport)[0].ok
    b.transport.read(make_offer([1], move="m1"), [0], [0], 5.0)
    assert wait(b.transport)[0].ok


@pytest.mark.parametrize("kind", KINDS)
def test_close_ends_every_read(end: Make, kind: str) -> None:
    a, b = pair(end, kind, 64, 1 << 20)
    a.board.open("m0", range(64))
    for _ in range(20):
        b.transport.read(make_offer(range(64)), range(64), range(64), 20.0)
    b.transport.close()
    assert len(b.transport.poll()) == 20
    names = [t.name for t in threading.enumerate() if t.is_alive()]
    assert len([n for n in names if n.startswith(f"kv-{kind}-")]) <= (2 if kind == "tcp" else 1)
