"""Pages over TCP: a server for peers, and a connection with a thread of its own to each peer that is read from."""

import socket
from collections.abc import Sequence

import msgspec

from kilat.base.errors import PeerError
from kilat.kv.board import Board
from kilat.kv.checksum import page_checksum
from kilat.kv.jobs import Job, Jobs, Lane
from kilat.kv.tcp_frames import Ask, Broken, Wire, framed
from kilat.kv.tcp_server import TcpServer
from kilat.kv.transport import WITHDRAWN, Done, Pages, compare_layout, layout_digest
from kilat.wire.kv import Endpoint, Offer

CONNECT_S = 5.0
VERIFY_BYTES = 512 << 10
"""Pages are verified while a core still has them in its cache."""


class TcpAddress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a server listens, the nonce of its board, and the digest of its layout."""

    host: str
    port: int
    nonce: bytes
    layout: bytes


class TcpTransport:
    """See :class:`kilat.kv.transport.Transport`. ``secret`` is the deployment's; ``host`` is listened on and told to peers."""

    kind = "tcp"

    def __init__(self, pages: Pages, board: Board, secret: bytes, *, host: str = "127.0.0.1") -> None:
        self._pages = pages
        self._secret = secret
        self._server = TcpServer(pages, board, secret, host)
        self._address = TcpAddress(host, self._server.port, board.nonce, layout_digest(pages.layout))
        self._jobs = Jobs(self.kind, pages.n_pages, pages.memory.__getitem__)
        self._peers: dict[str, _Peer] = {}

    def endpoint(self) -> Endpoint:
        return Endpoint(self.kind, msgspec.msgpack.encode(self._address))

    def connect(self, worker_id: str, endpoint: Endpoint) -> None:
        try:
            address = msgspec.msgpack.decode(endpoint.address, type=TcpAddress)
        except msgspec.MsgspecError as e:
            raise PeerError(f"the address of worker {worker_id} could not be read: {e}") from e
        compare_layout(self._pages.layout, address.layout)
        self.forget(worker_id)
        self._peers[worker_id] = _Peer(address, self._secret, self._pages, self._jobs)

    def forget(self, worker_id: str) -> None:
        peer = self._peers.pop(worker_id, None)
        if peer is not None:
            self._jobs.cancel_peer(worker_id)
            peer.lane.stop()

    def read(self, offer: Offer, take: Sequence[int], into: Sequence[int], deadline_s: float) -> int:
        peer = self._peers.get(offer.owner)
        return self._jobs.start(peer.lane if peer else None, offer, take, into, deadline_s)

    def poll(self) -> list[Done]:
        return self._jobs.poll()

    def cancel(self, ticket: int) -> None:
        self._jobs.cancel(ticket)

    def close(self) -> None:
        self._jobs.close()
        self._server.close()


class _Peer:
    """The connection to one peer. Made at the first read, kept, and made again after any trouble."""

    def __init__(self, address: TcpAddress, secret: bytes, pages: Pages, jobs: Jobs) -> None:
        self._address = address
        self._secret = secret
        self._memory = pages.memory
        self._bytes = pages.memory.reshape(-1).data
        self._page_bytes = pages.layout.page_bytes
        self._wire: Wire | None = None
        self.lane: Lane = jobs.lane(self._run, self._hang_up)

    def _run(self, job: Job) -> None:
        old = self._wire is not None
        try:
            try:
                why = self._fetch(job)
            except Broken:
                # The peer closes connections it has no room for: when nothing came over an old one, ask again over a new one.
                if not old or job.n_bytes:
                    raise
                self._hang_up()
                why = self._fetch(job)
        except BaseException:
            self._hang_up()  # bytes of this read may still be on their way
            raise
        if why:
            raise PeerError(why)

    def _fetch(self, job: Job) -> str:
        """Read all pages; returns why the owner did not give them, or an empty string."""
        if self._wire is None:
            self._wire = self._dial(job)
        wire = self._wire
        job.check(1 << 31)  # the owner knows how many pages it has
        wire.send([framed(Ask(job.offer.move_id, job.pages))], job.left_s)
        at = 0
        while True:
            reply = wire.receive_reply(job.left_s)
            if not reply.ok:
                return reply.why or WITHDRAWN
            into = job.into[at : at + len(reply.checksums)]
            if len(into) != len(reply.checksums) or (not into and at < len(job.into)):
                raise PeerError("the peer sent another number of pages than it was asked for")
            if not into:
                return ""
            self._receive(wire, job, into, reply.checksums)
            at += len(into)

    def _receive(self, wire: Wire, job: Job, into: Sequence[int], checksums: Sequence[int]) -> None:
        n = max(1, VERIFY_BYTES // self._page_bytes)
        for at in range(0, len(into), n):
            pages = into[at : at + n]
            wire.receive([self._page(p) for p in pages], job.left_s)
            job.n_bytes += len(pages) * self._page_bytes
            for page, checksum in zip(pages, checksums[at:]):
                if page_checksum(self._memory[page]) != checksum:
                    raise PeerError("a page arrived damaged: its checksum is another")

    def _dial(self, job: Job) -> Wire:
        address = self._address
        limit_s = min(job.left_s(), CONNECT_S)
        try:
            sock = socket.create_connection((address.host, address.port), timeout=limit_s)
        except OSError as e:
            raise Broken(f"the peer cannot be reached ({type(e).__name__})") from e
        wire = Wire(sock)
        try:
            wire.meet(self._secret, address.nonce, address.layout, job.left_s)
        except BaseException:
            wire.close()
            raise
        return wire

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def _page(self, page: int) -> memoryview:
        return self._bytes[page * self._page_bytes : (page + 1) * self._page_bytes]
