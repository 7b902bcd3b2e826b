"""Pages of workers of other hosts by NIXL (UCX: RDMA where there is some, else TCP): the reader copies, the owner's process need not help.

The owner's board lies in registered memory too and is read after the last page: a move that is not open then has failed. A read that is
given up may still write until its connection is closed, so it ends only after that. NIXL authenticates nobody: whoever reaches its ports
and knows an address may read pages, so this transport is for networks of one owner and has to be asked for.
Needs the package ``nixl`` with ``nixl-cu12`` or ``nixl-cu13``; only this file imports it.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

from kilat.base.errors import PeerError
from kilat.kv.board import BOARD_BYTES, Board, PeerBoard
from kilat.kv.jobs import Job, Jobs, Lane
from kilat.kv.transport import WITHDRAWN, Done, Pages, compare_layout, layout_digest
from kilat.wire.kv import Endpoint, Offer

BATCH_BYTES = 32 << 20
"""Read between two looks at cancel and deadline."""

POLL_S = 0.0002


class NixlAddress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``agent`` and ``metadata`` are NIXL's; ``pool`` and ``board`` are addresses in the owner's memory."""

    agent: str
    metadata: bytes
    pool: int
    n_pages: int
    board: int
    nonce: bytes
    layout: bytes


@dataclass
class _Peer:
    """``is_known``: NIXL was told of it. ``board`` is where a copy of its board comes. The thread of ``lane`` uses all but ``is_gone``."""

    address: NixlAddress
    board: np.ndarray = field(default_factory=lambda: np.zeros(BOARD_BYTES, np.uint8))
    registered: object = None
    is_known: bool = False
    is_gone: bool = False
    lane: Lane | None = None


class NixlTransport:
    """See :class:`kilat.kv.transport.Transport`. Each peer has a thread, so that one that stands still holds up nobody else."""

    kind = "nixl"

    def __init__(self, pages: Pages, board: Board) -> None:
        self._pages = pages
        config = nixl_agent_config(backends=["UCX"], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        self._agent = nixl_agent(f"kilat-{secrets.token_hex(8)}", config)
        self._pool = pages.memory.ctypes.data
        self._registered = [self._register(pages.memory), self._register(board.memory)]
        self._address = NixlAddress(
            agent=self._agent.name,
            metadata=bytes(self._agent.get_agent_metadata()),
            pool=self._pool,
            n_pages=pages.n_pages,
            board=board.memory.ctypes.data,
            nonce=board.nonce,
            layout=layout_digest(pages.layout),
        )
        self._peers: dict[str, _Peer] = {}
        self._lock = threading.Lock()  # of the agent's peers and registrations
        self._jobs = Jobs(self.kind, pages.n_pages, pages.memory.__getitem__)

    def endpoint(self) -> Endpoint:
        return Endpoint(self.kind, msgspec.msgpack.encode(self._address))

    def connect(self, worker_id: str, endpoint: Endpoint) -> None:
        try:
            address = msgspec.msgpack.decode(endpoint.address, type=NixlAddress)
        except msgspec.MsgspecError as e:
            raise PeerError(f"the address of worker {worker_id} could not be read: {e}") from e
        compare_layout(self._pages.layout, address.layout)
        self.forget(worker_id)
        peer = _Peer(address)
        peer.lane = self._jobs.lane(lambda job: self._read(job, peer), lambda: self._end(peer))
        self._peers[worker_id] = peer

    def forget(self, worker_id: str) -> None:
        peer = self._peers.pop(worker_id, None)
        if peer is not None and peer.lane is not None:
            peer.is_gone = True
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
        self._peers.clear()
        for descs in self._registered:
            self._agent.deregister_memory(descs)
        self._registered = []

    # -- a read, in the thread of the peer's lane -----------------------------------------------------------------------------------

    def _read(self, job: Job, peer: _Peer) -> None:
        if peer.is_gone:
            raise PeerError(f"worker {job.offer.owner} is gone")
        address, n = peer.address, self._pages.layout.page_bytes
        job.check(address.n_pages)
        try:
            if not peer.is_known:
                self._meet(peer)
            self._check_open(job, peer)
            step = max(1, BATCH_BYTES // n)
            for i in range(0, len(job.pages), step):
                theirs = [(address.pool + p * n, n, 0) for p in job.pages[i : i + step]]
                mine = [(self._pool + p * n, n, 0) for p in job.into[i : i + step]]
                self._copy(job, peer, theirs, mine)
                job.n_bytes += n * len(mine)
            self._check_open(job, peer)
        except PeerError:
            raise
        except Exception as e:  # NIXL has a tree of errors of its own
            self._leave(peer)
            raise PeerError(f"the pages could not be read ({type(e).__name__})") from e

    def _check_open(self, job: Job, peer: _Peer) -> None:
        here = (peer.board.ctypes.data, BOARD_BYTES, 0)
        self._copy(job, peer, [(peer.address.board, BOARD_BYTES, 0)], [here])
        if not PeerBoard(peer.board, peer.address.nonce).is_open(job.offer.move_id):
            raise PeerError(WITHDRAWN)

    def _copy(
        self, job: Job, peer: _Peer, theirs: list[tuple[int, int, int]], mine: list[tuple[int, int, int]]
    ) -> None:
        agent = self._agent
        handle = agent.initialize_xfer(
            "READ", _descs(agent, mine), _descs(agent, theirs), peer.address.agent, backends=["UCX"]
        )
        try:
            state = agent.transfer(handle)
            while state == "PROC":
                job.left_s()
                time.sleep(POLL_S)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(f"the transfer ended as {state}")
        except BaseException:
            # nothing may be written any more when this read is over: give it up, then close the connection
            _try(lambda: agent.release_xfer_handle(handle))
            self._leave(peer)
            raise
        agent.release_xfer_handle(handle)

    def _meet(self, peer: _Peer) -> None:
        with self._lock:
            self._agent.add_remote_agent(peer.address.metadata)
            peer.registered = peer.registered or self._register(peer.board)
        peer.is_known = True

    def _leave(self, peer: _Peer) -> None:
        if peer.is_known:
            peer.is_known = False
            with self._lock:
                _try(lambda: self._agent.remove_remote_agent(peer.address.agent))

    def _end(self, peer: _Peer) -> None:
        """The lane of a peer ends: nobody reads it any more."""
        self._leave(peer)
        if peer.registered is not None:
            with self._lock:
                self._agent.deregister_memory(peer.registered)

    def _register(self, memory: np.ndarray) -> object:
        return self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")


def _descs(agent: nixl_agent, spans: list[tuple[int, int, int]]) -> object:
    return agent.get_xfer_descs(spans, "DRAM")


def _try(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:  # noqa: BLE001, S110  (what is to be ended has ended)
        pass
