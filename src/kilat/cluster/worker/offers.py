"""Pages that leave: what this worker offers to others, keeps pinned for them, and takes back."""

import secrets
from collections.abc import Callable, Iterable, Sequence

from kilat.base.errors import CapacityError, NotFoundError
from kilat.base.log import event, get_logger
from kilat.cluster.worker.engine import MovingEngine
from kilat.kv.board import Board
from kilat.kv.moves import Move, Moves, State
from kilat.policy.sched.moves import Departed
from kilat.wire.kv import Offer
from kilat.wire.messages import FromWorker, Offered
from kilat.wire.session import SessionRecord

_log = get_logger("worker")


class Offers:
    """Belongs to the loop's thread. ``board`` is None when nobody can read this worker's pages: then sessions are offered without any."""

    def __init__(
        self,
        worker_id: str,
        engine: MovingEngine,
        page_tokens: int,
        board: Board | None,
        moves: Moves,
        send: Callable[[FromWorker], None],
        *,
        offer_s: float,
    ) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._page_tokens = page_tokens
        self._board = board
        self._moves = moves
        self._send = send
        self._offer_s = offer_s
        self._told: dict[str, int] = {}

    def watch(self, session_id: str) -> None:
        """Offer the full pages of this session as it fills them."""
        if self._board is not None:
            self._told[session_id] = 0

    def announce(self, session_id: str, now_s: float) -> None:
        """Offer the full pages that a session has, perhaps none, and from now on those that it fills. Unknown ids are ignored."""
        try:
            record = self._engine.export(session_id)
        except NotFoundError:
            return
        self.watch(session_id)
        if self._board is None or not self._announce(session_id, now_s):
            self._tell(session_id, self._offer(_new_id(), record.epoch, [], (0, 0), []), None, now_s)

    def export(self, session_id: str) -> None:
        """Stop a session and offer it when nothing of it is in flight. Unknown ids are ignored."""
        try:
            self._engine.freeze(session_id)
        except NotFoundError:
            pass  # it has ended, or goes with sample 0

    def lend(self, move_id: str, names: Sequence[bytes], now_s: float) -> None:
        """Offer the longest known start of a chain, perhaps nothing."""
        if any(m.move_id == move_id for m in self._moves):
            _log.warning("move %s was asked for twice", move_id)
            return
        pages = self._engine.lend(names) if self._board is not None else []
        n_tokens = len(pages) * self._page_tokens
        offer = self._offer(move_id, 0, pages, (0, n_tokens), list(names[: len(pages)]))
        self._tell(move_id, offer, None, now_s)

    def after_step(self, now_s: float) -> None:
        """Offer what the step has made ready: sessions that leave, then chunks of those that will."""
        for session_id in self._engine.take_frozen():
            try:
                departed = self._engine.depart(session_id)
            except NotFoundError:
                continue  # aborted meanwhile
            self._leave(session_id, departed, now_s)
        for session_id in list(self._told):
            self._announce(session_id, now_s)

    def offer_record(self, record: SessionRecord, now_s: float) -> None:
        """Offer a session of which nothing is computed here."""
        self._leave(record.session_id, Departed(record, [], 0), now_s)

    def release(self, move_ids: Iterable[str]) -> None:
        """Unpin the pages of these moves. Unknown ids are ignored."""
        for move_id in move_ids:
            move = self._moves.release(move_id)
            if move is not None:
                self._take_back(move)

    def expire(self, now_s: float) -> None:
        """Unpin what nobody has released in time; a reader that still reads it will be told that it failed."""
        for move in self._moves.overdue(now_s):
            event(_log, "offer_overdue", move=move.move_id, session=move.session_id, pages=len(move.pages))
            self._take_back(move)

    def _take_back(self, move: Move) -> None:
        if self._board is not None:
            self._board.shut(move.move_id)  # first, for after it nobody trusts these pages
        self._engine.unpin(move.pages)

    def _announce(self, session_id: str, now_s: float) -> bool:
        """Offer the full pages that were not offered yet; whether there were any."""
        try:
            n_tokens, pages = self._engine.computed(session_id)
        except NotFoundError:
            del self._told[session_id]
            return False
        told, full = self._told[session_id], n_tokens // self._page_tokens
        if full <= told:
            return False
        record = self._engine.export(session_id)
        self._engine.pin(pages[told:full])
        span = (told * self._page_tokens, full * self._page_tokens)
        offer = self._offer(_new_id(), record.epoch, pages[told:full], span, record.page_hashes[told:full])
        self._told[session_id] = full
        self._tell(session_id, offer, None, now_s)
        return True

    def _leave(self, session_id: str, departed: Departed, now_s: float) -> None:
        """The last offer names all pages, those of chunks too: whoever adopts the session may be another than the one they were told to."""
        record, pages, n_tokens = departed.record, departed.pages, departed.n_tokens
        self._told.pop(session_id, None)
        if self._board is None:
            self._engine.unpin(pages)
            pages, n_tokens = [], 0
        names = record.page_hashes[: n_tokens // self._page_tokens]
        offer = self._offer(_new_id(), record.epoch, pages, (0, n_tokens), names)
        self._tell(session_id, offer, record, now_s)

    def _offer(
        self, move_id: str, epoch: int, pages: list[int], span: tuple[int, int], names: list[bytes]
    ) -> Offer:
        """An offer of pages that are pinned, open for readers; without pages when there is no room for another move."""
        if pages and self._board is not None:
            try:
                self._board.open(move_id, pages)
            except CapacityError as e:
                _log.warning("%s", e.message)
                self._engine.unpin(pages)
                pages, span = [], (0, 0)
        names = names if pages else []
        return Offer(move_id, self._worker_id, epoch, pages, *span, self._offer_s, names)

    def _tell(self, session_id: str, offer: Offer, record: SessionRecord | None, now_s: float) -> None:
        if offer.pages:
            until_s = now_s + self._offer_s
            self._moves.offer(
                Move(offer.move_id, offer.owner, session_id, offer.epoch, offer.pages, until_s, State.OFFERED)
            )
        self._send(Offered(session_id, offer, record))


def _new_id() -> str:
    return "mov-" + secrets.token_hex(8)
