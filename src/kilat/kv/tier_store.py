"""The tiers of a worker as one store: pages go in behind the engine's back and come out as a peer's do, by reads with tickets.

    save     the loop's thread copies a page that is about to be lost to a buffer; a writing thread puts it into the first tier
    find     which start of a chain the tiers have
    read     a reading thread fills own pages; names of the offer say with what

Writing never waits: with all buffers in use a page is forgotten, as it would be without tiers.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kilat.base import metrics
from kilat.base.errors import PeerError
from kilat.base.log import get_logger
from kilat.kv.jobs import Job, Jobs
from kilat.kv.tier import Tier
from kilat.kv.transport import Done
from kilat.wire.kv import Offer

STAGING_BYTES = 64 << 20
"""Pages on their way to a tier; a pause of the disk that is longer than it takes to fill this costs some of them."""

_log = get_logger("kv")


class TierMemory(Protocol):
    """What is needed of the pool's memory (``engine.kv_memory.PageMemory``). Pages are uint8 [page_bytes]."""

    def save(self, page: int, into: np.ndarray) -> None: ...
    def load(self, page: int, fill: Callable[[np.ndarray], bool]) -> bool: ...
    def host_bytes(self, n_bytes: int) -> np.ndarray: ...


class Measured(NamedTuple):
    """Reading so many pages of one tier took so long."""

    tier: str
    n_pages: int
    seconds: float


class TierStore:
    """See :class:`kilat.kv.transport.Reader`; all methods are the loop's. Owns ``tiers``, fastest first."""

    def __init__(self, tiers: Sequence[Tier], memory: TierMemory, n_pages: int, page_bytes: int) -> None:
        self._tiers = list(tiers)
        self._memory = memory
        self._page_bytes = page_bytes
        n_buffers = max(4, min(n_pages, STAGING_BYTES // page_bytes))
        self.n_buffer_bytes = n_buffers * page_bytes
        buffers = memory.host_bytes(n_buffers * page_bytes).reshape(n_buffers, page_bytes)
        self._free = deque(buffers)
        self._coming: dict[bytes, None] = {}
        self._written: deque[bytes] = deque()
        self._lost: list[bytes] = []
        self._n_forgotten = 0
        self._measured: deque[Measured] = deque()
        self._jobs = Jobs("tier", n_pages, lambda page: np.empty(0, np.uint8))
        self._lane = self._jobs.lane(self._read)
        self._n_reading: dict[int, int] = {}
        self._queue: queue.SimpleQueue[tuple[bytes, np.ndarray] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="kv-tier-write", daemon=True)
        self._writer.start()

    # -- in -------------------------------------------------------------------------------------------------------------------------

    def save(self, name: bytes, page: int) -> None:
        """Keep a copy of own page ``page``, whose content is lost after this call."""
        self._settle()
        if name in self._coming or self.has(name):
            self.touch([name])
        elif self._free:
            buffer = self._free.popleft()
            self._memory.save(page, buffer)
            self._coming[name] = None
            self._queue.put((name, buffer))
        else:
            self._n_forgotten += 1

    @property
    def has_room(self) -> bool:
        """Whether :meth:`save` would keep a page now."""
        return bool(self._free)

    def _settle(self) -> None:
        """Take in what has been written, or should have been."""
        while self._written:
            name = self._written.popleft()
            self._coming.pop(name, None)
            if not self.has(name):
                self._lost.append(name)

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            name, buffer = item
            try:
                self._tiers[0].put(name, buffer)
            except Exception:  # noqa: BLE001  (logged; the page is forgotten)
                _log.exception("a page could not be put into a tier")
            self._free.append(buffer)
            self._written.append(name)

    # -- what is there --------------------------------------------------------------------------------------------------------------

    def has(self, name: bytes) -> bool:
        """Whether some tier has this page."""
        return any(tier.has(name) for tier in self._tiers)

    def holds(self, name: bytes) -> bool:
        """Whether some tier has this page or is about to."""
        self._settle()
        return name in self._coming or self.has(name)

    def find(self, names: Iterable[bytes]) -> list[str]:
        """In which tier each page of a chain is, up to the first that is in none."""
        out = []
        for name in names:
            kind = next((tier.kind for tier in self._tiers if tier.has(name)), None)
            if kind is None:
                break
            out.append(kind)
        return out

    def names(self) -> list[bytes]:
        """All pages that some tier has."""
        return list(dict.fromkeys(name for tier in self._tiers for name in tier.names()))

    def take_lost(self) -> list[bytes]:
        """Pages that no tier has any more, and one had, or was about to have, at the last call."""
        self._settle()
        lost = dict.fromkeys([*self._lost, *(name for tier in self._tiers for name in tier.take_lost())])
        self._lost.clear()
        return [name for name in lost if not self.holds(name)]

    def touch(self, names: Sequence[bytes]) -> None:
        """These pages are wanted, the last one the most."""
        for tier in self._tiers:
            tier.touch(names)

    # -- out ------------------------------------------------------------------------------------------------------------------------

    @property
    def n_reading(self) -> int:
        """Pages that reads have still to bring."""
        return sum(self._n_reading.values())

    def read(self, offer: Offer, take: Sequence[int], into: Sequence[int], deadline_s: float) -> int:
        """See :meth:`Reader.read`; ``offer.names[i]`` says what comes into the place of ``offer.pages[i]``."""
        ticket = self._jobs.start(self._lane, offer, take, into, deadline_s)
        self._n_reading[ticket] = len(take)
        return ticket

    def poll(self) -> list[Done]:
        """See :meth:`Reader.poll`."""
        ended = self._jobs.poll()
        for done in ended:
            self._n_reading.pop(done.ticket, None)
        return ended

    def cancel(self, ticket: int) -> None:
        """See :meth:`Reader.cancel`."""
        self._jobs.cancel(ticket)

    def take_measured(self) -> Iterator[Measured]:
        """What reads have taken since the last call."""
        while self._measured:
            yield self._measured.popleft()

    def _read(self, job: Job) -> None:
        job.check(len(job.offer.pages))
        names = [job.offer.names[i] for i in job.take]
        for name, page in zip(names, job.into):
            job.left_s()
            if not self._get(name, page):
                raise PeerError("a page is in no tier any more")
            job.n_bytes += self._page_bytes
        self.touch(names[::-1])  # the start of a chain is wanted by more prompts than its end

    def _get(self, name: bytes, page: int) -> bool:
        return any(tier.has(name) and self._get_from(tier, name, page) for tier in self._tiers)

    def _get_from(self, tier: Tier, name: bytes, page: int) -> bool:
        began_s = time.perf_counter()
        found = self._memory.load(page, lambda into: tier.get(name, into))
        if found:
            self._measured.append(Measured(tier.kind, 1, time.perf_counter() - began_s))
        return found

    # -- the end --------------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all reads, write what is on its way, close the tiers. Nothing touches the pool afterwards. Again: nothing."""
        self._jobs.close()
        self._queue.put(None)
        self._writer.join()
        while self._tiers:
            self._tiers.pop(0).close()

    def counters(self) -> dict[str, float]:
        """Numbers that only grow, by their names in base/metrics.py."""
        out = {metrics.TIER_PAGES_FORGOTTEN: float(self._n_forgotten)}
        for tier in self._tiers:
            out.update(tier.counters())
        return out
