"""The tier on a disk: one file of places of one size, a table of what is in them, and a bound on all of it.

    header   magic, key, bytes of a page, number of places      4096 bytes
    table    per place: name, checksum, age, CRC of these
    places   page after page

A place's entry is cleared before the page is written and set after it, and its checksum is of the page: so after a crash in the middle
an entry is either whole and true, or the page behind it is found to be damaged when it is read, which is a miss. Nothing is synced to
the disk for the same reason. ``key`` names what the pages are of; a file with another key is begun anew.
"""

import fcntl
import os
import struct
import threading
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kilat.base import metrics
from kilat.base.errors import ConfigError
from kilat.base.log import event, get_logger
from kilat.kv.checksum import page_checksum
from kilat.kv.tier import Slots, TierCounts

MAGIC = b"kilatdk1"
KEY_BYTES = 16
NAME_BYTES = 16
BLOCK_BYTES = 4096
_HEADER = struct.Struct("<8s16sQQ")
_ENTRY = struct.Struct("<16sIQ")
ENTRY_BYTES = _ENTRY.size + 4

_log = get_logger("kv")


class DiskTier:
    """At most ``max_bytes`` in the file ``pages`` of ``folder``, which only its owner may read, and one process at a time.

    A file that cannot be opened, written or read ends the tier with a warning, and nobody else hears of it. Raises ConfigError when a
    page does not fit.
    """

    kind = "disk"

    def __init__(self, folder: Path, key: bytes, page_bytes: int, max_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._slot_bytes = _blocks(page_bytes)
        self._n = (max_bytes - 2 * BLOCK_BYTES) // (self._slot_bytes + ENTRY_BYTES)
        if self._n < 1:
            need = 2 * BLOCK_BYTES + self._slot_bytes + ENTRY_BYTES
            raise ConfigError(
                f"the disk tier has {max_bytes:,} bytes, one page needs {need:,}: give it more or leave it off"
            )
        self._data = BLOCK_BYTES + _blocks(self._n * ENTRY_BYTES)
        self.counts = TierCounts()
        self._lock = threading.Lock()
        self._slots = Slots(self._n)
        self._sums: dict[int, int] = {}
        self._age = 0
        self._fd = -1
        self._off = False
        self._path = folder / "pages"
        try:
            self._open(folder, _HEADER.pack(MAGIC, key, page_bytes, self._n))
        except OSError as e:
            self._fail(e)

    @property
    def is_off(self) -> bool:
        """Whether something has failed."""
        return self._off

    # -- the tier -------------------------------------------------------------------------------------------------------------------

    def has(self, name: bytes) -> bool:
        with self._lock:
            return name in self._slots

    def put(self, name: bytes, page: np.ndarray) -> None:
        with self._lock:
            if name in self._slots:
                self._slots.touch([name])
                return
            place = None if self._off else self._slots.take()
        if place is None:
            return
        slot, old = place
        checksum = page_checksum(page)
        self._age += 1
        try:
            if old is not None:
                self._write(bytes(ENTRY_BYTES), BLOCK_BYTES + slot * ENTRY_BYTES)
            self._write(page.data, self._data + slot * self._slot_bytes)
            self._write(_entry(name, checksum, self._age), BLOCK_BYTES + slot * ENTRY_BYTES)
        except OSError as e:
            self._fail(e)
            return
        with self._lock:
            self._sums[slot] = checksum
            self._slots.fill(name, slot)
            self.counts.written_bytes += page.nbytes
            self.counts.evictions += old is not None

    def get(self, name: bytes, into: np.ndarray) -> bool:
        with self._lock:
            slot = self._slots.begin_read(name)
            checksum = self._sums.get(slot, -1) if slot is not None else -1
        if slot is None:
            return False
        try:
            whole = self._read(into, self._data + slot * self._slot_bytes)
        except OSError as e:
            self._fail(e)
            return False
        good = whole and page_checksum(into) == checksum
        with self._lock:
            self._slots.end_read(slot)
            if good:
                self.counts.hits += 1
                self.counts.read_bytes += into.nbytes
            else:
                self.counts.damaged += 1
                self._slots.drop(name)
        if not good:
            event(_log, "tier_page_damaged", tier=self.kind, slot=slot)
        return good

    def touch(self, names: Iterable[bytes]) -> None:
        with self._lock:
            self._slots.touch(names)

    def names(self) -> list[bytes]:
        with self._lock:
            return [name for name, _ in self._slots.items()]

    def take_lost(self) -> list[bytes]:
        with self._lock:
            return self._slots.take_lost()

    def counters(self) -> dict[str, float]:
        c = self.counts
        return {
            metrics.TIER_DISK_HITS: float(c.hits),
            metrics.TIER_DISK_READ_BYTES: float(c.read_bytes),
            metrics.TIER_DISK_WRITTEN_BYTES: float(c.written_bytes),
            metrics.TIER_DISK_EVICTIONS: float(c.evictions),
            metrics.TIER_DISK_DAMAGED: float(c.damaged),
        }

    def close(self) -> None:
        """Write down which pages were wanted last, and let others have the file."""
        if not self._off:
            table = bytearray(self._n * ENTRY_BYTES)
            for age, (name, slot) in enumerate(self._slots.items(), 1):
                table[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES] = _entry(name, self._sums[slot], age)
            try:
                self._write(table, BLOCK_BYTES)
            except OSError as e:
                self._fail(e)
        self._off = True
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # -- the file -------------------------------------------------------------------------------------------------------------------

    def _open(self, folder: Path, header: bytes) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self._path, flags, 0o600)
        os.fchmod(self._fd, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.pread(self._fd, len(header), 0) == header:
            self._find_pages()
            return
        os.ftruncate(self._fd, 0)
        self._write(bytes(self._n * ENTRY_BYTES), BLOCK_BYTES)
        self._write(header, 0)

    def _find_pages(self) -> None:
        """Build the index from the entries that make sense, in the order of their ages."""
        table = os.pread(self._fd, self._n * ENTRY_BYTES, BLOCK_BYTES)
        found = []
        for slot in range(len(table) // ENTRY_BYTES):
            raw = table[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES]
            name, checksum, age = _ENTRY.unpack(raw[: _ENTRY.size])
            if age and raw == _entry(name, checksum, age):
                found.append((age, slot, name, checksum))
        for age, slot, name, checksum in sorted(found):
            if name not in self._slots:
                self._slots.occupy(name, slot)
                self._sums[slot] = checksum
                self._age = age

    def _write(self, data: bytes | bytearray | memoryview, at: int) -> None:
        left = memoryview(data)
        while left:
            n = os.pwrite(self._fd, left, at)
            if n == 0:
                raise OSError("nothing was written")
            left, at = left[n:], at + n

    def _read(self, into: np.ndarray, at: int) -> bool:
        left = into.data
        while left:
            n = os.preadv(self._fd, [left], at)
            if n == 0:
                return False
            left, at = left[n:], at + n
        return True

    def _fail(self, e: OSError) -> None:
        why = "another process uses it" if isinstance(e, BlockingIOError) else e.strerror or type(e).__name__
        _log.warning("the disk tier %s is off from now on: %s", self._path, why)
        with self._lock:
            self._slots.drop_all()
            self._off = True  # the other thread may be using the file: it is closed at the end


def _blocks(n_bytes: int) -> int:
    return -(-n_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _entry(name: bytes, checksum: int, age: int) -> bytes:
    raw = _ENTRY.pack(name, checksum, age)
    return raw + zlib.crc32(raw).to_bytes(4, "little")
