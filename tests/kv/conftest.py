"""Readers of every transport, and owners in this process or another."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from kilat.kv.board import Board
from kilat.kv.local import LocalHub, LocalTransport
from kilat.kv.shm import ShmTransport
from kilat.kv.tcp import TcpTransport
from kilat.kv.transport import Pages, Transport
from tests.kv.pools import SECRET, Owner, make_pages


@dataclass
class End:
    """One worker's end: its pool, its board, its transport."""

    pages: Pages
    board: Board
    transport: Transport

    def close(self) -> None:
        self.transport.close()
        self.board.close()


@pytest.fixture
def end() -> Iterator[Callable[..., End]]:
    """Makes ends of one kind: ``end(kind, n_pages, page_bytes, hub=, secret=, model=)``."""
    made: list[End] = []
    hub = LocalHub()

    def make(kind: str, n: int = 8, page_bytes: int = 4096, *, secret: str = SECRET, model: str = "m") -> End:
        pages, board = make_pages(n, page_bytes, model=model, shared=True), Board()
        transport: Transport
        if kind == "local":
            transport = LocalTransport(hub, pages, board)
        elif kind == "shm":
            transport = ShmTransport(pages, board)
        elif kind == "nixl":
            transport = pytest.importorskip("kilat.kv.nixl", exc_type=ImportError).NixlTransport(pages, board)
        else:
            transport = TcpTransport(pages, board, secret.encode())
        made.append(End(pages, board, transport))
        return made[-1]

    yield make
    for e in made:
        e.close()


@pytest.fixture
def owner() -> Iterator[Callable[..., Owner]]:
    """Starts owners in processes of their own."""
    made: list[Owner] = []

    def make(*args: str) -> Owner:
        made.append(Owner(*args))
        return made[-1]

    yield make
    for o in made:
        o.stop()
