"""Moves of pages between workers that this gateway has started: who has them pinned, who reads them, for which session. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from kilat.wire.kv import Offer


@dataclass(frozen=True, slots=True)
class Move:
    """Pages that ``owner`` keeps pinned while ``reader`` reads them. Times are seconds of one clock."""

    move_id: str
    owner: str
    reader: str
    session_id: str
    n_pages: int
    began_s: float
    until_s: float


class MoveTable:
    """Open moves. Whatever is taken out of it must be released by whoever takes it."""

    def __init__(self) -> None:
        self._moves: dict[str, Move] = {}

    def __len__(self) -> int:
        return len(self._moves)

    def __iter__(self) -> Iterator[Move]:
        return iter(list(self._moves.values()))

    def open(self, offer: Offer, owner: str, reader: str, session_id: str, now_s: float) -> None:
        """``reader`` has been told to read what ``owner`` offers."""
        self._moves[offer.move_id] = Move(
            offer.move_id, owner, reader, session_id, len(offer.pages), now_s, now_s + offer.deadline_s
        )

    def fetched(self, reader: str, move_id: str) -> Move | None:
        """Take out a move that ``reader`` says is over; None when it is not its move."""
        move = self._moves.get(move_id)
        if move is None or move.reader != reader:
            return None
        return self._moves.pop(move_id)

    def take(self, session_id: str) -> list[Move]:
        """Take out the moves of a session."""
        return self._take([m for m in self._moves.values() if m.session_id == session_id])

    def lost(self, worker_id: str) -> list[Move]:
        """A worker is gone: takes out the moves it had a part in. Those that it owned are over by that, the others still pinned."""
        return self._take([m for m in self._moves.values() if worker_id in (m.owner, m.reader)])

    def overdue(self, now_s: float) -> list[Move]:
        """Take out the moves whose time is over."""
        return self._take([m for m in self._moves.values() if m.until_s < now_s])

    def _take(self, moves: list[Move]) -> list[Move]:
        for move in moves:
            del self._moves[move.move_id]
        return moves
