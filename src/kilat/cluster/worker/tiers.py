"""Pages that left this worker's pool and are kept in its tiers: what of a prompt is brought back, and how that is asked for.

To the rest of the worker a tier is a peer that lends the start of a prompt: an offer whose owner is :data:`TIER`, read into reserved
pages, sealed, and then the session starts. Names begin with the model and the tenant's salt, so tenants stay apart here too.
"""

import time
from dataclasses import dataclass
from itertools import count

from kilat.base.hashing import root_hash
from kilat.cluster.worker.engine import MovingEngine
from kilat.kv.tier_store import TierStore
from kilat.policy.cache.table import extend_chain
from kilat.policy.cache.tiers import TierRates
from kilat.wire.kv import KvLayout, Offer
from kilat.wire.session import SessionRecord

TIER = "tier"
READ_S = 10.0
"""A read that takes longer is given up, and the prompt is computed."""

GUESS_BYTES_PER_S = {"host": 5e9, "disk": 1e9}
"""Until reads have been measured."""


@dataclass(frozen=True, slots=True)
class Recall:
    """What to bring back for a session; or which read of the same pages, for another session, to wait for."""

    offer: Offer | None
    after: str | None = None


class Tiers:
    """Belongs to the loop's thread. Pages that the engine's pool evicts go to ``store`` from now on."""

    def __init__(self, engine: MovingEngine, store: TierStore, layout: KvLayout) -> None:
        self.store = store
        self._engine = engine
        self._model = layout.model
        self._page_tokens = layout.page_tokens
        self._rates = TierRates({k: layout.page_bytes / v for k, v in GUESS_BYTES_PER_S.items()})
        self._reading: dict[bytes, str] = {}
        self._where: dict[str, list[str]] = {}
        self._numbers = count()
        engine.watch_evictions(store.save)

    def recall(self, record: SessionRecord) -> Recall | None:
        """What the tiers have of a session's tokens behind what the pool has, when bringing it back is cheaper than computing it. The
        caller must read the offer, and say when that is over."""
        if record.params.prompt_logprobs is not None and record.branch == 0 and not record.output_ids:
            return None  # it must compute its whole prompt
        tokens = record.prompt_ids + record.output_ids
        names: list[bytes] = []
        n_pages = (len(tokens) - 1) // self._page_tokens
        extend_chain(names, root_hash(self._model, record.salt), tokens, self._page_tokens, n_pages)
        n_here = self._engine.n_known(names)
        if n_here == n_pages:
            return None
        if names[n_here] in self._reading:
            return Recall(None, after=self._reading[names[n_here]])
        where = self.store.find(names[n_here:])
        where = where[: self._n_worth_reading(where)]
        if not where:
            return None
        move_id, n = f"{TIER}-{next(self._numbers)}", n_here + len(where)
        self._reading.update(dict.fromkeys(names[n_here:n], move_id))
        self._where[move_id] = where
        n_tokens = n * self._page_tokens
        return Recall(Offer(move_id, TIER, record.epoch, list(range(n)), 0, n_tokens, READ_S, names[:n]))

    def _n_worth_reading(self, where: list[str]) -> int:
        for measured in self.store.take_measured():
            self._rates.measured(*measured)
        token_s = self._engine.prefill_token_s
        if not where or token_s is None:
            return len(where)
        queue_s = self.store.n_reading * self._rates.page_s(where[0])
        return self._rates.n_worth_reading(where, token_s * self._page_tokens, queue_s)

    def ended(self, offer: Offer) -> dict[str, int]:
        """The read of an offer is over, well or not, or was never begun; how many pages of which tier it was for."""
        self._reading = {name: move for name, move in self._reading.items() if move != offer.move_id}
        where = self._where.pop(offer.move_id, [])
        return {tier: where.count(tier) for tier in dict.fromkeys(where)}

    def keep_pool(self, limit_s: float) -> None:
        """At the end: save what the pool has too, children before their parents, so that the next life finds whole chains. Takes at most
        ``limit_s``."""
        until_s = time.monotonic() + limit_s
        for name in reversed(self._engine.page_names()):
            while not self.store.has_room and time.monotonic() < until_s:
                time.sleep(0.001)
            if time.monotonic() >= until_s:
                return
            pages = self._engine.lend([name])
            self.store.save(name, pages[0])
            self._engine.unpin(pages)

    # -- what can be found ------------------------------------------------------------------------------------------------------------

    def names(self) -> list[bytes]:
        """All pages in the tiers."""
        return self.store.names()

    def changed(self, stored: list[bytes], dropped: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        """What became findable in the pool, and what no longer is there: the same for pool and tiers together."""
        lost = [name for name in self.store.take_lost() if not self._engine.n_known([name])]
        gone = [name for name in dropped if not self.store.holds(name)]
        return stored, list(dict.fromkeys([*gone, *lost]))  # a page can leave the pool and a tier in one step
