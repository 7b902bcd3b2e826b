"""The board: which moves of a worker are open, kept by the owner of the pages, read by everybody who copies them.

It lies in memory that processes of one host can map, so a reader that needs no help from the owner's process still learns that the
owner has taken pages back. A move's entry is a hash of its id in two words; the second word is written first and cleared last, so a half
written entry is not the entry of any move. Both sides take a lock of their own around the words: that orders memory on every machine,
plain loads and stores do so only on some.
"""

import fcntl
import mmap
import os
import secrets
import threading
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from kilat.base.errors import CapacityError, PeerError

MAGIC = 0x6B696C61_74303031
SLOTS = 4096
NONCE_BYTES = 16
_HEADER_WORDS = 8
BOARD_BYTES = 8 * (_HEADER_WORDS + 2 * SLOTS)


class Board:
    """The owner's side. ``open`` and ``shut`` belong to the owner's thread, ``covers`` may be asked by any.

    ``nonce`` names this life of this worker: ids of processes and numbers of ports come again, it does not. ``fd`` is the shared
    memory, or None where the system has no such thing or nobody asked for it.
    """

    def __init__(self, *, shared: bool = True) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.fd: int | None = None
        if shared and hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("kilat-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, BOARD_BYTES)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            memory = mmap.mmap(self.fd, BOARD_BYTES)
        else:
            memory = mmap.mmap(-1, BOARD_BYTES)
        self._words = np.frombuffer(memory, np.uint64)
        self._words[1:3] = np.frombuffer(self.nonce, np.uint64)
        self._words[0] = MAGIC
        self._slots = self._words[_HEADER_WORDS:].reshape(SLOTS, 2)
        self._fence = threading.Lock()
        self._free = list(range(SLOTS - 1, -1, -1))
        self._open: dict[str, tuple[int, frozenset[int]]] = {}

    @property
    def memory(self) -> np.ndarray:
        """The board's bytes, for transports that read them from afar."""
        return self._words.view(np.uint8)

    def open(self, move_id: str, pages: Iterable[int]) -> None:
        """Let peers read these pages; they stay pinned and unchanged until :meth:`shut`. Raises CapacityError when the board is full,
        and PeerError when the move is open already."""
        if move_id in self._open:
            raise PeerError(f"move {move_id} is open already")
        if not self._free:
            raise CapacityError(f"{SLOTS:,} moves are open, limit {SLOTS:,}: release some")
        slot = self._free.pop()
        first, second = _words_of(move_id)
        with self._fence:
            self._slots[slot, 1] = second
        with self._fence:
            self._slots[slot, 0] = first
            self._open[move_id] = (slot, frozenset(pages))

    def shut(self, move_id: str) -> None:
        """From now on every read of this move fails, also one that is almost done. Unknown ids are ignored."""
        with self._fence:
            entry = self._open.pop(move_id, None)
            if entry is None:
                return
            self._slots[entry[0], 0] = 0
        with self._fence:
            self._slots[entry[0], 1] = 0
        self._free.append(entry[0])

    def covers(self, move_id: str, pages: Iterable[int]) -> bool:
        """Whether the move is open and has all these pages."""
        with self._fence:
            entry = self._open.get(move_id)
        return entry is not None and entry[1].issuperset(pages)

    def close(self) -> None:
        """Shut all moves and give the shared memory back; peers that have mapped it see an empty board."""
        for move_id in list(self._open):
            self.shut(move_id)
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class PeerBoard:
    """A reader's view of another process's board, mapped or copied. Raises PeerError when ``memory`` is not the board with this ``nonce``."""

    def __init__(self, memory: mmap.mmap | np.ndarray, nonce: bytes) -> None:
        words = np.frombuffer(memory, np.uint64)
        if len(memory) != BOARD_BYTES or int(words[0]) != MAGIC or words[1:3].tobytes() != nonce:
            raise PeerError("the peer is another process than the one that offered its pages")
        self._slots = words[_HEADER_WORDS:].reshape(SLOTS, 2)
        self._fence = threading.Lock()

    def is_open(self, move_id: str) -> bool:
        """Whether the owner still keeps the pages of this move unchanged."""
        first, second = _words_of(move_id)
        with self._fence:
            at = np.flatnonzero(self._slots[:, 0] == first)
            return any(self._slots[i, 1] == second for i in at)


def _words_of(move_id: str) -> tuple[np.uint64, np.uint64]:
    """The entry of a move; its first word is never 0, which means an empty slot."""
    digest = blake2b(move_id.encode(), digest_size=16).digest()
    first, second = np.frombuffer(digest, np.uint64)
    return np.uint64(first | np.uint64(1)), np.uint64(second)
