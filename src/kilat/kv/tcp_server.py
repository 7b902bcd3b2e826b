"""The owner's side of pages over TCP: one thread that accepts, one for each connection."""

import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kilat.base.errors import PeerError
from kilat.base.log import get_logger
from kilat.kv.board import Board
from kilat.kv.checksum import page_checksum
from kilat.kv.jobs import are_below
from kilat.kv.tcp_frames import Check, Reply, Wire, framed
from kilat.kv.transport import WITHDRAWN, Pages, layout_digest

MAX_CONNECTIONS = 256
HANDSHAKE_S = 5.0
STALL_S = 30.0
"""A client that takes no byte for this long is gone."""
BATCH_BYTES = 4 << 20
BATCH_PAGES = 256

_log = get_logger("kv")


class TcpServer:
    """Sends pages of moves that are open on ``board`` to whoever knows ``secret``. Threads start with it and end with :meth:`close`."""

    def __init__(self, pages: Pages, board: Board, secret: bytes, host: str) -> None:
        self._pages = pages
        self._board = board
        self._secret = secret
        self._layout = layout_digest(pages.layout)
        self._bytes = pages.memory.reshape(-1).data
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=MAX_CONNECTIONS)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._wires: dict[Wire, threading.Thread] = {}
        self._closing = False
        # sums of the next pages are made while the system takes the ones before
        self._summing = ThreadPoolExecutor(2, "kv-tcp-sum")
        self._thread = threading.Thread(target=self._accept, name="kv-tcp-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections and threads; afterwards nothing reads the pool."""
        if self._closing:
            return
        self._closing = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            threads = list(self._wires.items())
        for wire, _ in threads:
            wire.shutdown()
        for _, thread in threads:
            thread.join()
        self._summing.shutdown()

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._listener.accept()
            except OSError as e:
                if not self._closing:
                    _log.warning("a page connection could not be accepted (%s)", type(e).__name__)
                    time.sleep(0.05)  # out of file descriptors, most likely
                continue
            with self._lock:
                if self._closing or len(self._wires) >= MAX_CONNECTIONS:
                    sock.close()
                    continue
                wire = Wire(sock)
                thread = threading.Thread(target=self._serve, args=(wire,), name="kv-tcp-serve", daemon=True)
                self._wires[wire] = thread
                thread.start()

    def _serve(self, wire: Wire) -> None:
        try:
            wire.greet(self._secret, self._board.nonce, self._layout, _within(HANDSHAKE_S))
            while True:
                wire.wait_readable()
                self._answer(wire)
        except PeerError as e:
            _log.debug("a page connection ended: %s", e.message)
        except Exception:  # noqa: BLE001  (logged; this connection ends)
            _log.exception("a page connection failed")
        finally:
            with self._lock:
                self._wires.pop(wire, None)
            wire.close()

    def _answer(self, wire: Wire) -> None:
        ask = wire.receive_ask(_within(STALL_S))
        asked = frozenset(ask.pages)
        if not are_below(asked, self._pages.n_pages):
            wire.send(
                [framed(Reply(False, why="the offer names a page that its owner's pool does not have"))],
                _within(STALL_S),
            )
            return
        batches = _batches(ask.pages, self._pages.layout.page_bytes)
        sums = self._summing.submit(self._sums, batches[0]) if batches else None
        for i, pages in enumerate(batches):
            if sums is None or not self._board.covers(ask.move_id, pages):
                break
            head = framed(Reply(True, sums.result()))
            sums = self._summing.submit(self._sums, batches[i + 1]) if i + 1 < len(batches) else None
            wire.send([head, *map(self._page, pages)], _within(STALL_S))
        # What a page held when it was copied to the system is only known to be right if the move is still open now.
        ok = self._board.covers(ask.move_id, asked)
        wire.send([framed(Reply(ok, why="" if ok else WITHDRAWN))], _within(STALL_S))

    def _sums(self, pages: Sequence[int]) -> list[int]:
        return [page_checksum(self._pages.memory[p]) for p in pages]

    def _page(self, page: int) -> memoryview:
        n = self._pages.layout.page_bytes
        return self._bytes[page * n : (page + 1) * n]


def _batches(pages: Sequence[int], page_bytes: int) -> list[Sequence[int]]:
    n = max(1, min(BATCH_PAGES, BATCH_BYTES // page_bytes))
    return [pages[i : i + n] for i in range(0, len(pages), n)]


def _within(limit_s: float) -> Check:
    """A deadline that starts now."""
    until_s = time.monotonic() + limit_s

    def left_s() -> float:
        left = until_s - time.monotonic()
        if left <= 0:
            raise PeerError(f"a client of the pages took no byte for {limit_s:g} s")
        return left

    return left_s
