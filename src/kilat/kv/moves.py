"""Moves: which pages of a worker belong to which move, and what state it is in. Decides and performs nothing; time is an argument.

    out    OFFERED  --release-->  DONE         the reader has them, or nobody wants them
                    --overdue-->  FAILED       nobody said so in time
    in     MOVING   --ended----->  DONE, FAILED
                    --drop------>  QUARANTINED  nobody wants the pages any more, but the transport may still write them
           QUARANTINED --ended--> FAILED

A move that reaches DONE or FAILED leaves the table, and its pages are the caller's to use or to free. Not one moment before: a page
that somebody may still read (OFFERED) or write (MOVING, QUARANTINED) is never anybody else's.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from kilat.base.errors import EngineError


class State(StrEnum):
    """Where a move is in its life."""

    OFFERED = "offered"
    MOVING = "moving"
    DONE = "done"
    FAILED = "failed"
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class Move:
    """``pages`` are this worker's: pinned for a reader, or reserved to be read into. ``owner`` is the worker that offered them.
    ``until_s``: when an offer is taken back, or a read has to be over."""

    move_id: str
    owner: str
    session_id: str
    epoch: int
    pages: list[int]
    until_s: float
    state: State


class Moves:
    """All open moves of one worker. ``counts`` are those that ended, by state."""

    def __init__(self) -> None:
        self.counts: Counter[State] = Counter()
        self._out: dict[str, Move] = {}
        self._in: dict[str, Move] = {}

    def __len__(self) -> int:
        return len(self._out) + len(self._in)

    def __iter__(self) -> Iterator[Move]:
        return iter([*self._out.values(), *self._in.values()])

    @property
    def n_offered(self) -> int:
        """Moves whose pages somebody else may read."""
        return len(self._out)

    def n_pages(self) -> Counter[State]:
        """Pages by the state of their move."""
        pages: Counter[State] = Counter()
        for move in self:
            pages[move.state] += len(move.pages)
        return pages

    # -- out --------------------------------------------------------------------------------------------------------------------------

    def offer(self, move: Move) -> None:
        """A move whose pages are pinned from now on. Raises EngineError when its id is in use."""
        self._add(self._out, move, State.OFFERED)

    def release(self, move_id: str) -> Move | None:
        """OFFERED -> DONE; None for a move that is not offered, so that releasing twice does nothing."""
        return self._end(self._out, move_id, State.DONE)

    def overdue(self, now_s: float) -> list[Move]:
        """OFFERED -> FAILED for all whose time is over."""
        late = [m.move_id for m in self._out.values() if m.until_s <= now_s]
        return [m for i in late if (m := self._end(self._out, i, State.FAILED)) is not None]

    # -- in ---------------------------------------------------------------------------------------------------------------------------

    def begin(self, move: Move) -> None:
        """A read that has been started. Raises EngineError when its id is in use."""
        self._add(self._in, move, State.MOVING)

    def drop(self, move_id: str) -> None:
        """MOVING -> QUARANTINED; unknown moves are ignored."""
        move = self._in.get(move_id)
        if move is not None:
            move.state = State.QUARANTINED

    def ended(self, move_id: str, *, ok: bool) -> Move:
        """MOVING -> DONE or FAILED, QUARANTINED -> FAILED: the transport is done with the pages. Raises EngineError for an unknown move."""
        move = self._in.get(move_id)
        if move is None:
            raise EngineError(f"move {move_id} ended, but is not being read")
        good = ok and move.state is State.MOVING
        self._end(self._in, move_id, State.DONE if good else State.FAILED)
        return move

    def is_reading(self, move_id: str) -> bool:
        """Whether a read of this move has not ended."""
        return move_id in self._in

    def _add(self, table: dict[str, Move], move: Move, state: State) -> None:
        if move.move_id in table:
            raise EngineError(f"move {move.move_id} is there already")
        move.state = state
        table[move.move_id] = move

    def _end(self, table: dict[str, Move], move_id: str, state: State) -> Move | None:
        move = table.pop(move_id, None)
        if move is not None:
            move.state = state
            self.counts[state] += 1
        return move
