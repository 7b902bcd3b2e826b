"""Which transport is taken for which peer."""

from collections.abc import Sequence

import pytest

from kilat.base.errors import PeerError
from kilat.kv.links import Ended, Links, Ticket
from kilat.kv.transport import Done
from kilat.wire.kv import Endpoint, Offer
from tests.kv.pools import make_offer

pytestmark = pytest.mark.logic


class Fake:
    """A transport that remembers; an address of ``bad`` cannot be read."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.said: list[tuple[str, str]] = []
        self.done: list[Done] = []
        self.n = 0

    def endpoint(self) -> Endpoint:
        return Endpoint(self.kind, b"me")

    def connect(self, worker_id: str, endpoint: Endpoint) -> None:
        if endpoint.address == b"bad":
            raise PeerError("not from here")
        self.said.append(("connect", worker_id))

    def forget(self, worker_id: str) -> None:
        self.said.append(("forget", worker_id))

    def read(self, offer: Offer, take: Sequence[int], into: Sequence[int], deadline_s: float) -> int:
        self.n += 1
        self.done.append(Done(self.n, True, 7))
        return self.n

    def poll(self) -> list[Done]:
        done, self.done = self.done, []
        return done

    def cancel(self, ticket: int) -> None:
        self.said.append(("cancel", str(ticket)))

    def close(self) -> None:
        self.said.append(("close", ""))


def ends(**kinds: str) -> list[Endpoint]:
    return [Endpoint(kind, address.encode()) for kind, address in kinds.items()]


def make() -> tuple[Fake, Fake, Links]:
    shm, tcp = Fake("shm"), Fake("tcp")
    return shm, tcp, Links([shm, tcp])


def test_own_endpoints_are_told_best_first() -> None:
    assert [e.transport for e in make()[2].endpoints()] == ["shm", "tcp"]


def test_peer_is_read_over_its_best_transport_that_works() -> None:
    shm, tcp, links = make()
    links.set_peers({"a": ends(shm="x", tcp="y"), "b": ends(shm="bad", tcp="y"), "c": ends(nixl="z")})
    assert links.ways() == {"a": "shm", "b": "tcp"}
    assert (shm.said, tcp.said) == ([("connect", "a")], [("connect", "b")])
    assert links.read(make_offer([1], owner="a"), [0], [0], 1.0) == Ticket(0, 1)
    assert links.read(make_offer([1], owner="b"), [0], [0], 1.0) == Ticket(1, 1)
    assert links.read(make_offer([1], owner="c"), [0], [0], 1.0) is None
    assert links.read(make_offer([1], owner="d"), [0], [0], 1.0) is None
    assert links.poll() == [Ended(Ticket(0, 1), True, 7, ""), Ended(Ticket(1, 1), True, 7, "")]
    assert links.poll() == []


def test_peer_that_stays_is_left_alone_and_one_that_goes_is_forgotten() -> None:
    shm, _, links = make()
    links.set_peers({"a": ends(shm="x"), "b": ends(shm="x")})
    links.set_peers({"a": ends(shm="x")})
    assert shm.said == [("connect", "a"), ("connect", "b"), ("forget", "b")]
    assert links.ways() == {"a": "shm"}


def test_peer_that_came_again_is_connected_anew() -> None:
    shm, _, links = make()
    links.set_peers({"a": ends(shm="x")})
    links.set_peers({"a": ends(shm="bad")})
    assert links.ways() == {}
    links.set_peers({"a": ends(shm="y")})
    assert shm.said == [("connect", "a"), ("forget", "a"), ("connect", "a")]


def test_cancel_and_close_reach_the_transports() -> None:
    shm, tcp, links = make()
    links.cancel(Ticket(1, 5))
    links.close()
    assert (shm.said, tcp.said) == ([("close", "")], [("cancel", "5"), ("close", "")])
