"""Events of sessions on their way from the worker's link to the HTTP requests that wait for them. Pure: no socket, no clock.

One :class:`Inbox` per HTTP request holds the news of all its samples, so a request is woken once per step. A :class:`SessionTable`
routes events to inboxes and drops those of an old epoch, a repeated or missing sequence number, or nobody's session.
"""

import asyncio
from collections.abc import Iterable
from typing import Protocol

from kilat.base.errors import CapacityError, KilatError, PeerError
from kilat.wire.messages import SessionEvent

Item = tuple[int, SessionEvent]


class Inbox:
    """Bounded buffer between the link (pushes) and one request (takes). Belongs to the event loop's thread.

    ``max_tokens`` None means no bound. After :meth:`fail` the items that were there are still delivered, then the error is raised.
    """

    __slots__ = ("_error", "_items", "_max_tokens", "_nudged", "_tokens", "_waiter")

    def __init__(self, max_tokens: int | None = None) -> None:
        self._items: list[Item] = []
        self._tokens = 0
        self._max_tokens = max_tokens
        self._error: KilatError | None = None
        self._nudged = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def error(self) -> KilatError | None:
        return self._error

    def push(self, index: int, event: SessionEvent) -> bool:
        """Add news of sample ``index``. False, and the inbox has failed, when its reader is too far behind."""
        if self._error is not None:
            return False
        self._items.append((index, event))
        self._tokens += len(event.token_ids)
        if self._max_tokens is not None and self._tokens > self._max_tokens:
            self.fail(
                CapacityError(
                    f"{self._tokens} tokens wait for this reader, limit {self._max_tokens}: read the stream faster",
                    status=503,
                )
            )
            return False
        self._wake()
        return True

    def fail(self, error: KilatError) -> None:
        """End the request with ``error`` after what is buffered; the first error wins."""
        if self._error is None:
            self._error = error
        self._wake()

    def nudge(self) -> None:
        """Make a waiting :meth:`take` return an empty list, so that its stream can show a sign of life."""
        if self._waiter is not None:
            self._nudged = True
            self._wake()

    async def take(self) -> list[Item]:
        """Everything since the last call, oldest first; waits when there is nothing. Raises the error it was failed with."""
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._nudged:
                self._nudged = False
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items, self._tokens = self._items, [], 0
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Slot:
    """One sample that waits for events: where they go, and which one is next in order.

    ``tokens`` are the output tokens that have been let through, so a session can be given to another worker at any moment. ``began`` is
    the sequence number that its present worker starts with.
    """

    __slots__ = ("began", "branch", "epoch", "inbox", "index", "next_seq", "tokens")

    def __init__(self, branch: str, inbox: Inbox, index: int, epoch: int) -> None:
        self.branch = branch
        self.inbox = inbox
        self.index = index
        self.epoch = epoch
        self.next_seq = self.began = 0
        self.tokens: list[int] = []

    def raise_epoch(self) -> None:
        """Whoever has the session now has it no more: its events are dropped, those of the next one count from the tokens so far."""
        self.epoch += 1
        self.next_seq = self.began = len(self.tokens)


class Watcher(Protocol):
    """Who is told of turns in a session's life by a :class:`SessionTable`, before the event is passed on."""

    def begun(self, slot: Slot, event: SessionEvent) -> None:
        """The first event from the session's present worker."""

    def missed(self, slot: Slot) -> bool:
        """An event was lost on its way. True: the session goes on from the tokens that were let through."""

    def ended(self, slot: Slot, event: SessionEvent) -> bool:
        """The last event. False keeps it from the reader, and the session in the table: it goes on elsewhere."""


class Unwatched:
    """A watcher that lets everything pass."""

    def begun(self, slot: Slot, event: SessionEvent) -> None:
        pass

    def missed(self, slot: Slot) -> bool:
        return False

    def ended(self, slot: Slot, event: SessionEvent) -> bool:
        return True


class SessionTable:
    """The sessions that wait for events, by branch id."""

    def __init__(self) -> None:
        self._slots: dict[str, Slot] = {}
        self.watcher: Watcher = Unwatched()
        self.stale_events = 0
        self.slow_readers = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, branch: str) -> bool:
        return branch in self._slots

    def add(self, branch: str, inbox: Inbox, index: int, epoch: int = 0) -> Slot:
        """Route events of ``branch`` in ``epoch`` to ``inbox`` as sample ``index``."""
        slot = self._slots[branch] = Slot(branch, inbox, index, epoch)
        return slot

    def remove(self, branch: str) -> bool:
        """Forget a branch; True when it was still waiting for events. Idempotent."""
        return self._slots.pop(branch, None) is not None

    def deliver(self, events: Iterable[SessionEvent]) -> list[str]:
        """Route the events of one step. Returns branches to abort: their reader is too slow, or an event of them was lost."""
        cut: list[str] = []
        slots = self._slots
        for event in events:
            slot = slots.get(event.session_id)
            if slot is None or event.epoch != slot.epoch or event.seq < slot.next_seq:
                self.stale_events += 1
                continue
            if event.seq != slot.next_seq:
                if self.watcher.missed(slot):
                    continue
                slot.inbox.fail(
                    PeerError(
                        "an event of this answer was lost between two processes; send the request again"
                    )
                )
                cut.append(event.session_id)
                continue
            if event.seq == slot.began:
                self.watcher.begun(slot, event)
            slot.next_seq += 1
            slot.tokens += event.token_ids
            if event.finish is not None:
                if not self.watcher.ended(slot, event):
                    continue
                del slots[event.session_id]
            keeping_up = slot.inbox.error is None
            if not slot.inbox.push(slot.index, event):
                self.slow_readers += keeping_up
                cut.append(event.session_id)
        for branch in cut:
            self.remove(branch)
        return cut

    def fail(self, branch: str, error: KilatError) -> None:
        """The request of this branch ends with ``error``; unknown ids are ignored."""
        slot = self._slots.get(branch)
        if slot is not None:
            slot.inbox.fail(error)

    def fail_all(self, error: KilatError) -> None:
        """Every session ends with ``error``: this process is about to end."""
        slots, self._slots = self._slots, {}
        for slot in slots.values():
            slot.inbox.fail(error)
