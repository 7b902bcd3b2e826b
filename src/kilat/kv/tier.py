"""The contract of a tier: pages that left the pool, kept by their content hash until there is something better to keep.

A name stands for the model, its numbers and the tenant's salt besides the tokens, so a tier needs to know nothing of tenants. Whoever
writes and whoever reads may be two threads, one of each kind.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(slots=True)
class TierCounts:
    """Numbers that only grow. ``hits``: pages given back; ``damaged``: pages that were not what had been written."""

    hits: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    evictions: int = 0
    damaged: int = 0


class Tier(Protocol):
    """Pages are uint8 [page_bytes]. A tier that fails keeps nothing from then on; no method raises."""

    @property
    def kind(self) -> str:
        """Its name: ``host`` or ``disk``."""
        ...

    def counters(self) -> dict[str, float]:
        """Numbers that only grow, by their names in base/metrics.py."""
        ...

    def has(self, name: bytes) -> bool:
        """Whether :meth:`get` would probably give it."""
        ...

    def put(self, name: bytes, page: np.ndarray) -> None:
        """Keep a copy of a page, in the place of the one that nobody has wanted for the longest time."""
        ...

    def get(self, name: bytes, into: np.ndarray) -> bool:
        """Copy a page to ``into``; False when it is not here (any more), and then ``into`` may hold anything."""
        ...

    def touch(self, names: Iterable[bytes]) -> None:
        """These are wanted, the last one the most; unknown ones are ignored."""
        ...

    def names(self) -> list[bytes]:
        """All that is here."""
        ...

    def take_lost(self) -> list[bytes]:
        """Names that are no longer here and were at the last call."""
        ...

    def close(self) -> None:
        """End. What is kept for the next life is written."""
        ...


class Slots:
    """Which name is in which of ``n`` places, least wanted first. Not thread-safe.

    A place that is being read is not given to another name, one that is being written has none.
    """

    def __init__(self, n: int) -> None:
        self._free = list(range(n - 1, -1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._reading: dict[int, int] = {}
        self._lost: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, name: bytes) -> bool:
        return name in self._slot_of

    def items(self) -> list[tuple[bytes, int]]:
        """(name, place), least wanted first."""
        return list(self._slot_of.items())

    def take(self) -> tuple[int, bytes | None] | None:
        """A place to write, and the name that was there until now; None when all are being read or written."""
        if self._free:
            return self._free.pop(), None
        old = next((name for name, slot in self._slot_of.items() if slot not in self._reading), None)
        if old is None:
            return None
        slot = self._slot_of.pop(old)
        self._lost[old] = None
        return slot, old

    def give(self, slot: int) -> None:
        """A place that was taken is free again."""
        self._free.append(slot)

    def fill(self, name: bytes, slot: int) -> None:
        """A place that was taken holds ``name`` now."""
        self._slot_of[name] = slot
        self._lost.pop(name, None)

    def occupy(self, name: bytes, slot: int) -> None:
        """A free place turns out to hold ``name``, which is wanted more than those before."""
        self._free.remove(slot)
        self.fill(name, slot)

    def begin_read(self, name: bytes) -> int | None:
        """The place of a name, kept until :meth:`end_read`; None when it is not here."""
        slot = self._slot_of.get(name)
        if slot is not None:
            self._reading[slot] = self._reading.get(slot, 0) + 1
        return slot

    def end_read(self, slot: int) -> None:
        self._reading[slot] -= 1
        if not self._reading[slot]:
            del self._reading[slot]

    def lose(self, name: bytes) -> None:
        """It is not here, which is to be told (again)."""
        self._lost[name] = None

    def drop(self, name: bytes) -> None:
        """What is there is not what it should be."""
        slot = self._slot_of.pop(name, None)
        if slot is not None:
            self._free.append(slot)
            self._lost[name] = None

    def drop_all(self) -> None:
        for name in list(self._slot_of):
            self.drop(name)

    def touch(self, names: Iterable[bytes]) -> None:
        """See :meth:`Tier.touch`."""
        for name in names:
            if name in self._slot_of:
                self._slot_of.move_to_end(name)

    def take_lost(self) -> list[bytes]:
        """See :meth:`Tier.take_lost`."""
        lost, self._lost = list(self._lost), {}
        return lost
