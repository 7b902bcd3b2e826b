"""Pages of workers in the same process: one copy from pool to pool."""

import secrets
from collections.abc import Sequence

from kilat.base.errors import PeerError
from kilat.kv.board import Board
from kilat.kv.jobs import Job, Jobs, copy_pages
from kilat.kv.transport import Done, Pages, compare_layout, layout_digest
from kilat.wire.kv import Endpoint, Offer


class LocalHub:
    """Where the pools of one process find each other. Owned by whoever starts the workers."""

    def __init__(self) -> None:
        self.pools: dict[bytes, tuple[Pages, Board]] = {}


class LocalTransport:
    """See :class:`kilat.kv.transport.Transport`."""

    kind = "local"

    def __init__(self, hub: LocalHub, pages: Pages, board: Board) -> None:
        self._hub = hub
        self._pages = pages
        self._address = secrets.token_bytes(16)
        self._peers: dict[str, tuple[Pages, Board]] = {}
        self._jobs = Jobs(self.kind, pages.n_pages, pages.memory.__getitem__)
        self._lane = self._jobs.lane(self._copy)
        hub.pools[self._address] = (pages, board)

    def endpoint(self) -> Endpoint:
        return Endpoint(self.kind, layout_digest(self._pages.layout) + self._address)

    def connect(self, worker_id: str, endpoint: Endpoint) -> None:
        n = len(endpoint.address) - len(self._address)
        compare_layout(self._pages.layout, endpoint.address[:n])
        found = self._hub.pools.get(endpoint.address[n:])
        if found is None:
            raise PeerError(f"worker {worker_id} is not in this process")
        self.forget(worker_id)
        self._peers[worker_id] = found

    def forget(self, worker_id: str) -> None:
        if self._peers.pop(worker_id, None) is not None:
            self._jobs.cancel_peer(worker_id)

    def read(self, offer: Offer, take: Sequence[int], into: Sequence[int], deadline_s: float) -> int:
        lane = self._lane if offer.owner in self._peers else None
        return self._jobs.start(lane, offer, take, into, deadline_s)

    def poll(self) -> list[Done]:
        return self._jobs.poll()

    def cancel(self, ticket: int) -> None:
        self._jobs.cancel(ticket)

    def close(self) -> None:
        self._hub.pools.pop(self._address, None)
        self._jobs.close()

    def _copy(self, job: Job) -> None:
        found = self._peers.get(job.offer.owner)
        if found is None:
            raise PeerError(f"worker {job.offer.owner} is gone")
        pages, board = found
        copy_pages(job, pages.memory, self._pages.memory, lambda: board.covers(job.offer.move_id, job.pages))
