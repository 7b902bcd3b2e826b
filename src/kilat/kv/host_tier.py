"""The tier in the host's memory, for pools that lie on a device: a pool in the host's memory gains nothing by a copy beside it."""

import threading
import time
from collections.abc import Callable, Iterable

import numpy as np

from kilat.base import metrics
from kilat.base.errors import ConfigError
from kilat.kv.tier import Slots, TierCounts

SPILL_S = 1.0
"""Whoever ends the worker does not wait for long, nor a read for a page that is on its way to the next tier."""


class HostTier:
    """``memory`` is its room, uint8 [n_pages, page_bytes], pinned if the device wants that. What has to leave goes to ``spill`` (name,
    page) first, the next tier's ``put``. Raises ConfigError without room for a page."""

    kind = "host"

    def __init__(
        self, memory: np.ndarray, spill: Callable[[bytes, np.ndarray], None] = lambda name, page: None
    ) -> None:
        if not len(memory):
            raise ConfigError("the host tier has no room for one page; give it more memory")
        self.counts = TierCounts()
        self._memory = memory
        self._spill = spill
        self._slots = Slots(len(memory))
        self._leaving: bytes | None = None
        self._lock = threading.Condition()

    def has(self, name: bytes) -> bool:
        with self._lock:
            return name in self._slots or name == self._leaving

    def put(self, name: bytes, page: np.ndarray) -> None:
        with self._lock:
            if name in self._slots:
                self._slots.touch([name])
                return
            place = self._slots.take()
            self._leaving = place[1] if place is not None else None
        if place is None:  # all are being read
            self._spill(name, page)
            return
        slot, old = place
        try:
            if old is not None:
                self._spill(old, self._memory[slot])
        finally:
            with self._lock:
                self._leaving = None
                if old is not None:
                    self._slots.lose(old)  # whoever asked meanwhile took it for here
                self._lock.notify_all()
        np.copyto(self._memory[slot], page)
        with self._lock:
            self._slots.fill(name, slot)
            self.counts.written_bytes += page.nbytes
            self.counts.evictions += old is not None

    def get(self, name: bytes, into: np.ndarray) -> bool:
        with self._lock:
            # on its way to the next tier it is in neither; then it is there
            self._lock.wait_for(lambda: name != self._leaving, SPILL_S)
            slot = self._slots.begin_read(name)
        if slot is None:
            return False
        np.copyto(into, self._memory[slot])
        with self._lock:
            self._slots.end_read(slot)
            self.counts.hits += 1
            self.counts.read_bytes += into.nbytes
        return True

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
            metrics.TIER_HOST_HITS: float(c.hits),
            metrics.TIER_HOST_READ_BYTES: float(c.read_bytes),
            metrics.TIER_HOST_WRITTEN_BYTES: float(c.written_bytes),
            metrics.TIER_HOST_EVICTIONS: float(c.evictions),
        }

    def close(self) -> None:
        """What was in memory only goes to the next tier, the most wanted first, for at most :data:`SPILL_S`."""
        until_s = time.monotonic() + SPILL_S
        for name, slot in reversed(self._slots.items()):
            if time.monotonic() > until_s:
                return
            self._spill(name, self._memory[slot])
