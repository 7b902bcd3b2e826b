"""Which transport reads which peer: the first of the peer's endpoints that works from here."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kilat.base.errors import PeerError
from kilat.base.log import event, get_logger
from kilat.kv.transport import Reader, Transport
from kilat.wire.kv import Endpoint, Offer

_log = get_logger("kv")


class Ticket(NamedTuple):
    """A read of one of the readers; ``reader`` is its place among them."""

    reader: int
    number: int


class Ended(NamedTuple):
    """The end of a read: ``Done`` of the transport that did it."""

    ticket: Ticket
    ok: bool
    n_bytes: int
    why: str


class Links:
    """A worker's transports, best first, and its peers. Owned by one thread; owns the transports. ``stores`` are read too, by the owner's
    name that their offers have; no peer knows them."""

    def __init__(self, transports: Sequence[Transport], stores: Mapping[str, Reader] | None = None) -> None:
        self._transports = list(transports)
        self._readers: list[Reader] = [*transports, *(stores or {}).values()]
        self._stores = {owner: len(transports) + i for i, owner in enumerate(stores or {})}
        self._peers: dict[str, list[Endpoint]] = {}
        self._way: dict[str, int] = {}

    def endpoints(self) -> list[Endpoint]:
        """How peers read this worker, best first."""
        return [t.endpoint() for t in self._transports]

    def ways(self) -> dict[str, str]:
        """The kind of transport that reads each peer; peers that cannot be read are not there."""
        return {peer: self._transports[i].kind for peer, i in self._way.items()}

    def set_peers(self, peers: Mapping[str, Sequence[Endpoint]]) -> None:
        """Know these peers and no others. Reads from one that is gone, or that came again as another, fail."""
        for peer in [p for p, ends in self._peers.items() if list(peers.get(p, ())) != ends]:
            del self._peers[peer]
            way = self._way.pop(peer, None)
            if way is not None:
                self._transports[way].forget(peer)
        for peer, ends in peers.items():
            if peer not in self._peers:
                self._peers[peer] = list(ends)
                self._find_way(peer, ends)

    def _find_way(self, peer: str, ends: Sequence[Endpoint]) -> None:
        reasons = []
        for end in ends:
            for i, transport in enumerate(self._transports):
                if transport.kind != end.transport:
                    continue
                try:
                    transport.connect(peer, end)
                except PeerError as e:
                    reasons.append(f"{end.transport}: {e.message}")
                    continue
                self._way[peer] = i
                event(_log, "peer", worker=peer, transport=end.transport)
                return
        _log.warning(
            "pages of worker %s cannot be read: %s", peer, "; ".join(reasons) or "no transport in common"
        )

    def read(
        self, offer: Offer, take: Sequence[int], into: Sequence[int], deadline_s: float
    ) -> Ticket | None:
        """See :meth:`Reader.read`; None when there is no way to the owner."""
        way = self._stores.get(offer.owner, self._way.get(offer.owner))
        if way is None:
            return None
        return Ticket(way, self._readers[way].read(offer, take, into, deadline_s))

    def poll(self) -> list[Ended]:
        """Reads that have ended since the last call; see :meth:`Reader.poll`."""
        return [
            Ended(Ticket(i, done.ticket), done.ok, done.n_bytes, done.why)
            for i, reader in enumerate(self._readers)
            for done in reader.poll()
        ]

    def cancel(self, ticket: Ticket) -> None:
        """End a read soon; it is still told by :meth:`poll`."""
        self._readers[ticket.reader].cancel(ticket.number)

    def close(self) -> None:
        """Close all readers: nothing touches the pool afterwards."""
        for reader in self._readers:
            reader.close()
