"""The contract of a page transport: read pages that a peer has offered into pages of one's own.

Why a read can never hand out bytes of a page that its owner has reused: the owner keeps a move's pages pinned and unchanged while the
move is open on its board (``kv/board.py``), and unpins only after it has shut it. Every transport looks at the board after the last
byte was copied and fails the read when the move is not open any more. No clocks are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from kilat.base.errors import PeerError
from kilat.wire.kv import Endpoint, KvLayout, Offer

DIGEST_BYTES = 16

CANCELLED = "cancelled"
DEADLINE = "the deadline has passed"
WITHDRAWN = "the owner has withdrawn the pages"


class Done(NamedTuple):
    """The end of one read. After it, and not before, the pages that were read into may be used for something else.

    ``n_bytes`` were read for it, also when it failed; ``why`` is empty when ``ok``.
    """

    ticket: int
    ok: bool
    n_bytes: int
    why: str = ""


@dataclass(frozen=True)
class Pages:
    """A worker's page pool as bytes: uint8 [n_pages, page_bytes], owned by the engine. ``fd`` is the memory's file descriptor when it has one."""

    layout: KvLayout
    memory: np.ndarray
    fd: int | None = None

    @property
    def n_pages(self) -> int:
        return int(self.memory.shape[0])


class Reader(Protocol):
    """Reads pages into own ones. All methods are called by one thread and return at once; bytes move in threads of the reader."""

    def read(self, offer: Offer, take: Sequence[int], into: Sequence[int], deadline_s: float) -> int:
        """Start to read ``offer.pages[i] for i in take`` of ``offer.owner`` into own pages ``into``; returns a ticket.

        Every ticket ends with exactly one :class:`Done`, at the latest soon after ``deadline_s`` seconds. Whatever is wrong with the
        peer or the offer is told there.
        """
        ...

    def poll(self) -> list[Done]:
        """Reads that have ended since the last call."""
        ...

    def cancel(self, ticket: int) -> None:
        """End a read soon; its Done still comes. Unknown tickets are ignored."""
        ...

    def close(self) -> None:
        """End all reads and threads. Nothing touches the pool afterwards."""
        ...


class Transport(Reader, Protocol):
    """A reader of peers' pages."""

    @property
    def kind(self) -> str:
        """Its name in ``Endpoint.transport``."""
        ...

    def endpoint(self) -> Endpoint:
        """How peers read this worker's pages."""
        ...

    def connect(self, worker_id: str, endpoint: Endpoint) -> None:
        """Know a peer from now on. Raises PeerError when it cannot be read this way: another layout, another host, a dead process.

        A transport that has to wait for the peer connects at the first read instead; then that read fails.
        """
        ...

    def forget(self, worker_id: str) -> None:
        """Know a peer no more: its reads fail soon. Unknown ids are ignored."""
        ...


def layout_digest(layout: KvLayout) -> bytes:
    """Names a layout: equal for both ends of a move, or there is no move."""
    return blake2b(msgspec.msgpack.encode(layout), digest_size=DIGEST_BYTES).digest()


def compare_layout(mine: KvLayout, theirs: bytes) -> None:
    """Raises PeerError when ``theirs`` is the digest of another layout."""
    if layout_digest(mine) != theirs:
        raise PeerError(
            "the peer's pages have another layout (model, weights, kernels or page size): it cannot be read"
        )
