"""The reading thread that transports share, and the copy between two pools that this process has mapped."""

import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kilat.base.errors import PeerError
from kilat.base.log import get_logger
from kilat.kv.checksum import page_checksum
from kilat.kv.transport import CANCELLED, DEADLINE, WITHDRAWN, Done
from kilat.wire.kv import Offer

STRIDE_BYTES = 8 << 20
"""Bytes copied between two looks at cancel and deadline: about a millisecond."""

_log = get_logger("kv")


@dataclass(slots=True)
class Job:
    """One read: pages of the owner, own pages (of ``n_own``) they go to, and when to give up (``time.monotonic``).

    The numbers come from another process: who copies looks at them with :meth:`check` or :meth:`block` before.
    """

    ticket: int
    offer: Offer
    take: Sequence[int]
    into: Sequence[int]
    until_s: float
    n_own: int
    cancelled: bool = False
    n_bytes: int = 0
    pages: list[int] = field(default_factory=list)

    def left_s(self) -> float:
        """Seconds until the deadline. Raises PeerError when the read is to end: cancelled, or too late."""
        if self.cancelled:
            raise PeerError(CANCELLED)
        left = self.until_s - time.monotonic()
        if left <= 0:
            raise PeerError(DEADLINE)
        return left

    def check(self, n_theirs: int) -> None:
        """:meth:`block` of all pages, for those who do not need it."""
        self.block(n_theirs, 0, len(self.pages))

    def block(self, n_theirs: int, begin: int, end: int) -> np.ndarray:
        """int32 [2, end - begin]: ``pages`` and ``into`` of that part. Raises PeerError when the owner's pool of ``n_theirs`` pages does not
        have one, or the own pool."""
        try:
            pages, into = (_packed(row[begin:end]) for row in (self.pages, self.into))
        except struct.error as e:
            raise PeerError(f"these are no numbers of pages: {e}") from e
        if not _are_in(pages, n_theirs):
            raise PeerError("the offer names a page that its owner's pool does not have")
        if not _are_in(into, self.n_own):
            raise PeerError("a page to be read into is not in the pool")
        return np.stack((pages, into))


def are_below(numbers: Collection[int], end: int) -> bool:
    """Whether all numbers are 0 ... end - 1."""
    return not numbers or (min(numbers) >= 0 and max(numbers) < end)


def _are_in(numbers: np.ndarray, end: int) -> bool:
    return not len(numbers) or (int(numbers.min()) >= 0 and int(numbers.max()) < end)


def _packed(numbers: Sequence[int]) -> np.ndarray:
    """int32 [n]; ``struct`` takes half of the time that numpy takes."""
    return np.frombuffer(struct.pack(f"{len(numbers)}i", *numbers), np.int32)


class Jobs:
    """The reads of one transport, and threads that do them one after another: one thread for each ``lane`` (a peer, or all of them).

    ``n_pages`` is the size of the own pool, ``bytes_of`` gives a page of it: an offer's checksums are verified there, after the copy.
    """

    def __init__(self, kind: str, n_pages: int, bytes_of: Callable[[int], np.ndarray]) -> None:
        self._kind = kind
        self._n_pages = n_pages
        self._bytes_of = bytes_of
        self._live: dict[int, Job] = {}
        self._done: deque[Done] = deque()
        self._lanes: list[Lane] = []
        self._n = 0

    def lane(self, run: Callable[[Job], None], end: Callable[[], None] = lambda: None) -> "Lane":
        """A thread that does jobs with ``run``, which raises PeerError when one fails; ``end`` is called when the thread ends."""
        lane = Lane(f"kv-{self._kind}-{len(self._lanes)}", lambda job: self._do(run, job), end)
        self._lanes = [*(old for old in self._lanes if old.is_alive), lane]
        return lane

    def start(
        self, lane: "Lane | None", offer: Offer, take: Sequence[int], into: Sequence[int], deadline_s: float
    ) -> int:
        """Queue a read; without a lane it fails, for nobody knows the peer."""
        self._n += 1
        takes = take if isinstance(take, range) else tuple(take)
        job = Job(self._n, offer, takes, tuple(into), time.monotonic() + deadline_s, self._n_pages)
        self._live[job.ticket] = job
        if lane is None:
            self._done.append(Done(job.ticket, False, 0, f"worker {offer.owner} is not known or gone"))
        else:
            lane.put(job)
        return job.ticket

    def poll(self) -> list[Done]:
        """See :meth:`Reader.poll`."""
        out = []
        while self._done:
            out.append(self._done.popleft())
            self._live.pop(out[-1].ticket, None)
        return out

    def cancel(self, ticket: int) -> None:
        """See :meth:`Reader.cancel`."""
        job = self._live.get(ticket)
        if job is not None:
            job.cancelled = True

    def cancel_peer(self, worker_id: str) -> None:
        """End all reads from one worker."""
        for job in list(self._live.values()):
            if job.offer.owner == worker_id:
                job.cancelled = True

    def close(self) -> None:
        """Cancel everything and join the threads."""
        for job in list(self._live.values()):
            job.cancelled = True
        for lane in self._lanes:
            lane.stop()
        for lane in self._lanes:
            lane.join()

    def _do(self, run: Callable[[Job], None], job: Job) -> None:
        why = ""
        try:
            job.left_s()
            self._check(job)
            run(job)
            job.left_s()
            self._verify(job)
        except PeerError as e:
            why = e.message
        except Exception as e:  # noqa: BLE001  (logged; the read fails, its pages are computed)
            _log.exception("a read of pages failed")
            why = f"the read failed ({type(e).__name__})"
        self._done.append(Done(job.ticket, not why, job.n_bytes, why))

    def _check(self, job: Job) -> None:
        """Fill ``job.pages``."""
        n_offered = len(job.offer.pages)
        takes_all = job.take == range(n_offered)
        if len(job.take) != len(job.into) or not (takes_all or are_below(job.take, n_offered)):
            raise PeerError(
                f"{len(job.take)} pages of an offer of {n_offered} cannot be read into {len(job.into)}"
            )
        job.pages = job.offer.pages if takes_all else [job.offer.pages[i] for i in job.take]

    def _verify(self, job: Job) -> None:
        sums = job.offer.checksums
        if not sums:
            return
        if len(sums) != len(job.offer.pages):
            raise PeerError(f"the offer has {len(sums)} checksums for {len(job.offer.pages)} pages")
        for i, page in zip(job.take, job.into):
            if page_checksum(self._bytes_of(page)) != sums[i]:
                raise PeerError("a page arrived damaged: its checksum is another")


class Lane:
    """One thread and its queue."""

    def __init__(self, name: str, do: Callable[[Job], None], end: Callable[[], None]) -> None:
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._do = do
        self._end = end
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        self._queue.put(job)

    def stop(self) -> None:
        """End the thread after the jobs that are queued; cancel them first to make that soon."""
        self._queue.put(None)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            self._do(job)
        self._end()


def copy_pages(job: Job, source: np.ndarray, target: np.ndarray, is_open: Callable[[], bool]) -> None:
    """Copy ``job.pages`` of ``source`` to ``job.into`` of ``target``, both uint8 [pages, page_bytes]; neighbours go in one piece.

    Raises PeerError when the owner has withdrawn the pages before the last byte was copied, and at cancel and deadline.
    """
    job.check(len(source))
    if not is_open():
        raise PeerError(WITHDRAWN)
    for first, to, n in _runs(job.pages, job.into, max(1, STRIDE_BYTES // source.shape[1])):
        job.left_s()
        np.copyto(target[to : to + n], source[first : first + n])
        job.n_bytes += n * source.shape[1]
    if not is_open():
        raise PeerError(WITHDRAWN)


def _runs(pages: Sequence[int], into: Sequence[int], longest: int) -> Iterator[tuple[int, int, int]]:
    """(page, own page, n): pieces in which both sides count up by one."""
    at = 0
    while at < len(pages):
        n = 1
        while (
            n < longest
            and at + n < len(pages)
            and pages[at + n] == pages[at] + n
            and into[at + n] == into[at] + n
        ):
            n += 1
        yield pages[at], into[at], n
        at += n
