"""PrefixIndex: which worker holds which pages by name, kept from numbered messages that may be lost, late or doubled.

A worker never holds a page without the pages before it in the chain (PagePool evicts leaves first), so the holders of a chain only get
fewer along it. Names that came one after the other and have the same holders share one record that counts them: where the holders of
a chain change is first looked for as far on as that count says, and else by halving. So a lookup reads little more than one name for
each change of the holders, however long the chain is.

What it says is a hint: a page may be gone when it is asked for. After a gap nothing is believed to have changed until the whole
list comes; a worker that is ``max_behind`` messages ahead of what is known counts as holding nothing.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
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


@dataclass(slots=True, eq=False)
class _Run:
    """``n`` names with the same holders, one bit of ``mask`` each. ``last`` is the one that came last, empty when it has left. Most runs are
    a part of one chain; in some there are names of several, or of parts of a chain that are not neighbours."""

    mask: int
    n: int = 0
    last: bytes = b""


HOPS = 64
"""Runs that a lookup passes one by one, as long as their counts are right; then it only halves."""


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
        self._runs: dict[bytes, _Run] = {}
        self._nobody = _Run(0)
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
        find, nobody, ids = self._runs.get, self._nobody, self._id_of_bit
        depth: dict[str, int] = {}
        n, hops = len(names), HOPS
        at, run = 0, find(names[0], nobody)  # all of ``held`` have this name
        held = run.mask
        known = [(n - 1, find(names[-1], nobody))]  # places further on and their runs, the nearest last
        while held and known:
            high, there = known[-1]
            if there.mask & held == held:
                at, run = known.pop()
                continue
            # from run to run, as long as their counts are right
            while hops and (end := at + run.n) < high:
                hops -= 1
                after = find(names[end], nobody)
                if gone := held & ~after.mask:
                    if run.last != names[end - 1]:
                        known.append((end, after))
                        high, there = end, after
                        break
                    held ^= gone
                    while gone not in ids:
                        bit = gone & -gone
                        depth[ids[bit]] = end
                        gone ^= bit
                    depth[ids[gone]] = end
                    if not held:
                        return depth
                at, run = end, after
            if not held & ~there.mask:
                continue
            if at + run.n == high and run.last == names[high - 1]:
                at = high - 1
            # what the count did not say
            while high - at > 1:
                middle = (at + high) // 2
                here = find(names[middle], nobody)
                if here.mask & held == held:
                    at = middle
                else:
                    if here.mask == there.mask:
                        known.pop()
                    known.append((middle, here))
                    high, there = middle, here
            gone = held & ~there.mask
            held ^= gone
            while gone:
                bit = gone & -gone
                depth[ids[bit]] = high
                gone ^= bit
            at, run = known.pop()
        while held:
            bit = held & -held
            depth[ids[bit]] = n
            held ^= bit
        return depth

    def was_dropped(self, name: bytes) -> str | None:
        """The worker that last evicted this page, if nobody holds it and it is not long ago."""
        return None if name in self._runs else self._dropped.get(name)

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
        runs, bit, nobody = self._runs, worker.bit, self._nobody
        run = nobody
        for name in names:
            old = runs.get(name, nobody)
            mask = old.mask | bit
            if mask != run.mask:
                run = _Run(mask)
            old.n -= 1
            if old.last == name:
                old.last = b""
            run.n += 1
            run.last = name
            runs[name] = run
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
        parted: dict[_Run, _Run] = {}  # names that leave a run together are a run again
        for name in names:
            old = self._runs[name]
            if old.mask == worker.bit:
                del self._runs[name]
                _leave(old, name)
                continue
            run = parted.get(old)
            if run is None:
                run = parted[old] = _Run(old.mask ^ worker.bit)
            if old.last == name:
                run.last = name
            _leave(old, name)
            run.n += 1
            self._runs[name] = run

    def _ids(self, mask: int) -> Iterator[str]:
        while mask:
            bit = mask & -mask
            yield self._id_of_bit[bit]
            mask ^= bit


def _leave(run: _Run, name: bytes) -> None:
    run.n -= 1
    if run.last == name:
        run.last = b""
