"""Pages of another process of this host: its pool is mapped, read only, and copied from; no system call per page, no help of its process.

The pool is found through ``/proc/<pid>/fd/<n>``, which takes the rights to inspect that process (same user). A process id may have been
given to somebody else meanwhile: so the board's nonce and the file's inode are compared after mapping.
"""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kilat.base.errors import ConfigError, PeerError
from kilat.kv.board import BOARD_BYTES, Board, PeerBoard
from kilat.kv.jobs import Job, Jobs, copy_pages
from kilat.kv.mapping import host_id, map_file
from kilat.kv.transport import Done, Pages, compare_layout, layout_digest
from kilat.wire.kv import Endpoint, Offer

NICE = 19


class ShmAddress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a pool is mapped from. ``host`` tells hosts and their containers apart, ``inode`` one memory file from another."""

    host: str
    pid: int
    pool_fd: int
    inode: int
    n_pages: int
    board_fd: int
    nonce: bytes
    layout: bytes


@dataclass(frozen=True)
class _Peer:
    memory: np.ndarray
    board: PeerBoard


class ShmTransport:
    """See :class:`kilat.kv.transport.Transport`. Raises ConfigError when the pool or the board is not in shared memory."""

    kind = "shm"

    def __init__(self, pages: Pages, board: Board) -> None:
        if pages.fd is None or board.fd is None:
            raise ConfigError("the page pool is not in shared memory: start the engine with shared_pool")
        self._pages = pages
        self._address = ShmAddress(
            host=host_id(),
            pid=os.getpid(),
            pool_fd=pages.fd,
            inode=os.fstat(pages.fd).st_ino,
            n_pages=pages.n_pages,
            board_fd=board.fd,
            nonce=board.nonce,
            layout=layout_digest(pages.layout),
        )
        self._peers: dict[str, _Peer] = {}
        self._jobs = Jobs(self.kind, pages.n_pages, pages.memory.__getitem__)
        self._lane = self._jobs.lane(self._copy)

    def endpoint(self) -> Endpoint:
        return Endpoint(self.kind, msgspec.msgpack.encode(self._address))

    def connect(self, worker_id: str, endpoint: Endpoint) -> None:
        try:
            address = msgspec.msgpack.decode(endpoint.address, type=ShmAddress)
        except msgspec.MsgspecError as e:
            raise PeerError(f"the address of worker {worker_id} could not be read: {e}") from e
        compare_layout(self._pages.layout, address.layout)
        if address.host != host_id():
            raise PeerError(f"worker {worker_id} is on another host")
        size = address.n_pages * self._pages.layout.page_bytes
        try:
            board = map_file(address.pid, address.board_fd, BOARD_BYTES)
            pool = map_file(address.pid, address.pool_fd, size, inode=address.inode)
        except (OSError, ValueError) as e:
            raise PeerError(f"the pages of worker {worker_id} cannot be mapped ({type(e).__name__})") from e
        memory = np.frombuffer(pool, np.uint8).reshape(address.n_pages, -1)
        self.forget(worker_id)
        self._peers[worker_id] = _Peer(memory, PeerBoard(board, address.nonce))

    def forget(self, worker_id: str) -> None:
        if worker_id in self._peers:
            last = [self._peers.pop(worker_id)]
            self._jobs.cancel_peer(worker_id)
            threading.Thread(target=_unmap, args=(last,), name="kv-unmap", daemon=True).start()

    def read(self, offer: Offer, take: Sequence[int], into: Sequence[int], deadline_s: float) -> int:
        lane = self._lane if offer.owner in self._peers else None
        return self._jobs.start(lane, offer, take, into, deadline_s)

    def poll(self) -> list[Done]:
        return self._jobs.poll()

    def cancel(self, ticket: int) -> None:
        self._jobs.cancel(ticket)

    def close(self) -> None:
        self._jobs.close()
        self._peers.clear()

    def _copy(self, job: Job) -> None:
        peer = self._peers.get(job.offer.owner)
        if peer is None:
            raise PeerError(f"worker {job.offer.owner} is gone")
        copy_pages(job, peer.memory, self._pages.memory, lambda: peer.board.is_open(job.offer.move_id))


def _unmap(last: list[_Peer]) -> None:
    """Drop a mapping behind everything else that this process does: when its owner has ended, this frees all of the pool's memory, which
    takes as long as some steps."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    last.clear()
