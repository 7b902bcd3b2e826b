"""A worker loop with a disk tier, and perhaps a host tier, behind a small pool."""

from pathlib import Path
from typing import Any

import numpy as np
from worker_pair import Worker, check_same

from kilat.cluster.worker.mover import Roads
from kilat.kv.disk_tier import DiskTier
from kilat.kv.host_tier import HostTier
from kilat.kv.local import LocalHub
from kilat.kv.tier import Tier
from kilat.kv.tier_store import TierStore
from kilat.wire.messages import StepEvents, Submit
from kilat.wire.session import SessionRecord
from tests.policy.sched.fakes import record

KEY = b"k" * 16
DISK_BYTES = 1 << 22
SMALL: dict[str, Any] = {"n_pages": 20, "max_model_len": 76}


class Tiered(Worker):
    """A worker with tiers and a way to peers; ``room``: host pages, for a host tier before the disk."""

    def __init__(self, folder: Path, *, room: int = 0, name: str = "w", **config: Any) -> None:
        self.folder, self.room = folder, room
        super().__init__(name, LocalHub(), "shm", **(config if "engine" in config else {**SMALL, **config}))

    def _roads(self, hub: LocalHub, transport: Any) -> Roads | None:
        roads = super()._roads(hub, transport)
        assert roads is not None
        self.page_bytes: int = self.engine.pages.layout.page_bytes
        self.disk = DiskTier(self.folder, KEY, self.page_bytes, DISK_BYTES)
        tiers: list[Tier] = [self.disk]
        if self.room:
            tiers.insert(0, HostTier(np.zeros((self.room, self.page_bytes), np.uint8), self.disk.put))
        self.store = TierStore(tiers, self.engine.pages, self.engine.info.n_pages, self.page_bytes)
        return Roads(roads.transports, roads.board, roads.layout, self.store)

    def ask(self, session_id: str, prompt: list[int], **params: Any) -> SessionRecord:
        """Run one session to its end, and check what it said."""
        r = record(session_id, prompt, **{"max_tokens": 4, **params})
        self.tell(Submit(r))
        check_same(r, self)
        return r

    def settle(self) -> None:
        """Until all evicted pages are written."""
        self.until(lambda: self.store._queue.empty() and len(self.store._free) == self.n_buffers)

    @property
    def n_buffers(self) -> int:
        return max(4, self.engine.info.n_pages)

    def cached(self, session_id: str) -> int:
        """Prompt tokens that a session found in the pool."""
        events = [e for m in self.all(StepEvents) for e in m.events if e.session_id == session_id]
        return events[0].cached_tokens
