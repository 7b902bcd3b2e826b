"""PrefixIndex: which worker holds which pages by name, kept from numbered messages that may be lost, late or doubled.

A worker never holds a page without the pages before it in the chain (PagePool evicts leaves first), so the holders of a chain only get
fewer along it, and the place where one drops out is found by halving instead of reading the whole chain.

What it says is a hint: a page may be gone when it is asked for. After a gap nothing is believed to have changed until the whole
list comes; a worker that is ``max_behind`` messages ahead of what is known counts as holding nothing.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kilat.wire.messages import PagesChanged


@dataclass(slots=True, eq=False)
class _Worker:
    """``seq`` is the last message taken in, ``seen`` the highest number heard of, ``asked`` that number when a resync was last asked for
    (None: nothing is missing)."""

    bit: int
    names: set[bytes] = field(default_factory=set)
    seq: int = -1
    seen: int = -1
    asked: int | None = None


class PrefixIndex:
    """Names of pages by worker. Not thread-safe.

    ``max_behind``: messages after which a worker that has not answered a resync is no longer believed. ``ask_every``: while an answer
    is missing, every so many further messages ask again. ``remember``: how many evicted names :meth:`was_dropped` knows.
    """

    def __init__(self, *, max_behind: int = 256, ask_every: int = 32, remember: int = 65536) -> None:
        self.max_behind = max_behind
        self.ask_every = ask_every
        self.remember = remember
        self._workers: dict[str, _Worker] = {}
        self._mask: dict[bytes, int] = {}
        self._id_of_bit: dict[int, str] = {}
        self._dropped: OrderedDict[bytes, str] = OrderedDict()

    # -- what workers say ---------------------------------------------------------------------------------------------------------

    def apply(self, worker_id: str, change: PagesChanged) -> bool:
        """Take in a message of a worker; False when ``Resync`` should be sent to it now.

        Numbers start at 0 in each life of a worker (``forget`` it when it dies). A message that was taken in already, or is older than
        the whole list, changes nothing.
        """
        worker = self._find(worker_id)
        worker.seen = max(worker.seen, change.seq)
        if change.whole:
            if change.seq >= worker.seq:
                self._replace(worker_id, worker, change.stored)
                worker.seq = change.seq
                worker.asked = None
        elif worker.asked is None and change.seq == worker.seq + 1:
            self._store(worker, change.stored)
            self._drop(worker_id, worker, change.dropped)
            worker.seq = change.seq
        return self._in_step(worker_id, worker)

    def confirm(self, worker_id: str, seq: int) -> bool:
        """A worker says that ``seq`` is the number of its last message, -1 for none yet; False when ``Resync`` should be sent to it now.
        This finds a lost message that no other follows."""
        if seq < 0:
            return False
        worker = self._find(worker_id)
        worker.seen = max(worker.seen, seq)
        if worker.asked is not None:
            worker.asked = None  # time has gone by since the last question
        return self._in_step(worker_id, worker)

    def forget(self, worker_id: str) -> None:
        """A worker is gone, and its pages with it. Unknown ids are ignored."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            self._clear(worker, worker.names)
            del self._id_of_bit[worker.bit]

    # -- what is asked ------------------------------------------------------------------------------------------------------------

    def holders(self, names: Sequence[bytes]) -> dict[str, int]:
        """How many pages from the start of the chain ``names`` each worker holds; those that hold none are left out."""
        if not names:
            return {}
        find = self._mask.get
        first = find(names[0], 0)
        last = find(names[-1], 0) & first
        depth: dict[int, int] = {}
        spans = [(0, first, len(names) - 1, last)] if first != last else []
        while spans:
            low, held, high, left = spans.pop()
            while high - low > 1:
                middle = (low + high) // 2
                here = find(names[middle], 0) & held
                if here == held:
                    low = middle
                elif here == left:
                    high = middle
                else:
                    spans.append((middle, here, high, left))
                    high, left = middle, here
            for bit in _bits(held & ~left):
                depth[bit] = min(depth.get(bit, high), high)
        for bit in _bits(last):
            depth.setdefault(bit, len(names))
        return {self._id_of_bit[bit]: n_pages for bit, n_pages in depth.items()}

    def was_dropped(self, name: bytes) -> str | None:
        """The worker that last evicted this page, if nobody holds it and it is not long ago."""
        return None if name in self._mask else self._dropped.get(name)

    def names(self, worker_id: str) -> frozenset[bytes]:
        """All pages that a worker is believed to hold."""
        worker = self._workers.get(worker_id)
        return frozenset(worker.names) if worker is not None else frozenset()

    def is_behind(self, worker_id: str) -> bool:
        """Whether messages of this worker are missing, so that what is known of it is old."""
        worker = self._workers.get(worker_id)
        return worker is None or worker.seen > worker.seq

    # -- inside -------------------------------------------------------------------------------------------------------------------

    def _find(self, worker_id: str) -> _Worker:
        worker = self._workers.get(worker_id)
        if worker is None:
            bit = 1
            while bit in self._id_of_bit:
                bit <<= 1
            worker = self._workers[worker_id] = _Worker(bit)
            self._id_of_bit[bit] = worker_id
        return worker

    def _in_step(self, worker_id: str, worker: _Worker) -> bool:
        """Whether nothing is missing, or it was asked for a short while ago."""
        if worker.seen <= worker.seq:
            return True
        if worker.seen - worker.seq > self.max_behind:
            self._clear(worker, worker.names)
            worker.names = set()
        if worker.asked is not None and worker.seen - worker.asked < self.ask_every:
            return True
        worker.asked = worker.seen
        return False

    def _store(self, worker: _Worker, names: Iterable[bytes]) -> None:
        mask, bit = self._mask, worker.bit
        for name in names:
            mask[name] = mask.get(name, 0) | bit
            worker.names.add(name)

    def _drop(self, worker_id: str, worker: _Worker, names: Iterable[bytes]) -> None:
        held = [name for name in dict.fromkeys(names) if name in worker.names]
        self._clear(worker, held)
        worker.names.difference_update(held)
        for name in held:
            self._dropped[name] = worker_id
            self._dropped.move_to_end(name)
        while len(self._dropped) > self.remember:
            self._dropped.popitem(last=False)

    def _replace(self, worker_id: str, worker: _Worker, names: Sequence[bytes]) -> None:
        self._drop(worker_id, worker, worker.names.difference(names))
        self._store(worker, names)

    def _clear(self, worker: _Worker, names: Iterable[bytes]) -> None:
        for name in names:
            left = self._mask[name] & ~worker.bit
            if left:
                self._mask[name] = left
            else:
                del self._mask[name]


def _bits(mask: int) -> list[int]:
    """The set bits of a mask, each as a number of its own."""
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low)
        mask ^= low
    return bits
