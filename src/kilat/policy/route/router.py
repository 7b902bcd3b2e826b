"""Router: filter the workers, score what is left in seconds, pick. Calls change nothing, so the same question has the same answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any
from zlib import crc32

from kilat.base.errors import CapacityError
from kilat.policy.route.config import RouterConfig
from kilat.policy.route.costs import Costs, LinkRate, Prefill
from kilat.policy.route.index import PrefixIndex
from kilat.policy.route.views import Route, RouteRequest, WorkerView

NEAR = 1.02
"""Options at most this much dearer than the best one are as good as it: among them the session's id decides."""

BEST = 8


@dataclass(frozen=True, slots=True)
class _Option:
    worker: WorkerView
    decode: WorkerView | None
    prefill: Prefill
    decode_s: float
    hand_over_s: float
    reason: str

    @property
    def total_s(self) -> float:
        return self.prefill.total_s + self.hand_over_s + self.decode_s

    def draw(self, session_id: str) -> int:
        decode = self.decode.worker_id if self.decode is not None else ""
        return crc32(f"{session_id} {self.worker.worker_id} {decode}".encode())


class Router:
    """Chooses workers for requests. ``index`` and ``link`` are fed by whoever owns the router; workers unknown to ``index`` hold nothing."""

    def __init__(self, config: RouterConfig | None = None, index: PrefixIndex | None = None) -> None:
        self.config = config or RouterConfig()
        self.index = index or PrefixIndex()
        self.link = LinkRate(self.config.move_s, self.config.page_move_s)

    def choose(self, request: RouteRequest, workers: Sequence[WorkerView], now_s: float) -> Route:
        """The workers for a request. Raises CapacityError (503) when no worker can take it now.

        The caller must count the request as the workers' load at once (``Loads.sent`` with ``why["tokens_left"]``).
        """
        held = self.index.holders(request.names)
        able, refused = self._filter(request, workers, held, now_s)
        if not able:
            raise CapacityError("no worker can take this request now: try again", status=503)
        lenders = [w for w in workers if "silent" not in refused.get(w.worker_id, "")]
        options = self._options(Costs(self.config, self.link, request, able), able, lenders, held)
        best_s = min(o.total_s for o in options)
        near = [o for o in options if o.total_s <= best_s * NEAR]
        chosen = min(near, key=lambda o: o.draw(request.session_id))
        return Route(
            worker=chosen.worker.worker_id,
            decode=chosen.decode.worker_id if chosen.decode is not None else None,
            lend_from=chosen.prefill.lend_from,
            n_lent=chosen.prefill.n_lent,
            why=self._why(request, chosen, options, held, refused),
        )

    # -- filter -------------------------------------------------------------------------------------------------------------------

    def _filter(
        self, request: RouteRequest, workers: Sequence[WorkerView], held: dict[str, int], now_s: float
    ) -> tuple[list[WorkerView], dict[str, str]]:
        """Workers that can take the request, and why the others cannot. When all are full, those that could hold it are taken: it waits
        in a queue rather than being refused."""
        n_pages = -(-(request.n_prompt + 1) // request.page_tokens)
        able, full, refused = [], [], {}
        for w in workers:
            n_new = n_pages - held.get(w.worker_id, 0)
            if now_s - w.seen_s > self.config.dead_after_s:
                refused[w.worker_id] = f"silent for {now_s - w.seen_s:.1f} s"
            elif w.draining:
                refused[w.worker_id] = "draining"
            elif w.n_pages < n_pages:
                refused[w.worker_id] = f"has {w.n_pages} pages, {n_pages} are needed"
            elif w.free_pages < n_new:
                refused[w.worker_id] = f"has {w.free_pages} free pages, {n_new} are needed"
                full.append(w)
            else:
                able.append(w)
        return (able or full), refused

    # -- score --------------------------------------------------------------------------------------------------------------------

    def _options(
        self, costs: Costs, able: Sequence[WorkerView], lenders: Sequence[WorkerView], held: dict[str, int]
    ) -> list[_Option]:
        ranked = sorted(lenders, key=lambda w: held.get(w.worker_id, 0), reverse=True)[:2]
        prefills = {}
        for w in able:
            peer = next((p.worker_id for p in ranked if p.worker_id != w.worker_id), None)
            n_peer = held.get(peer, 0) if peer is not None else 0
            prefills[w.worker_id] = costs.prefill(w, held.get(w.worker_id, 0), peer, n_peer)
        computing = [w for w in able if w.prefill_weight > 0] or able
        decoding = [w for w in able if w.decode_weight > 0] or able
        queued = all(w.queued_prompt_tokens for w in computing)
        options = []
        for w in decoding:
            reason = self._stays(w, prefills[w.worker_id], computing, queued)
            if reason is not None:
                options.append(_Option(w, None, prefills[w.worker_id], costs.decode_s(w), 0.0, reason))
        for w in computing:
            if w not in decoding and costs.too_short_to_move(w):
                reason = f"at most {costs.request.n_answer} tokens are left to write"
                options.append(_Option(w, None, prefills[w.worker_id], costs.decode_s(w), 0.0, reason))
        # with many workers only the best of each side are paired: the two costs add up, so no better pair is missed
        takers = nsmallest(
            BEST,
            [(costs.decode_s(d), costs.hand_over_s(held.get(d.worker_id, 0)), d) for d in decoding],
            key=lambda taker: taker[0] + taker[1],
        )
        for w in nsmallest(BEST, computing, key=lambda w: prefills[w.worker_id].total_s):
            for decode_s, move_s, d in takers:
                if d is not w and w.decode_weight < d.decode_weight:
                    options.append(_Option(w, d, prefills[w.worker_id], decode_s, move_s, "handed over"))
        return options

    def _stays(
        self, w: WorkerView, prefill: Prefill, computing: Sequence[WorkerView], queued: bool
    ) -> str | None:
        """Why ``w`` may both compute the prompt and go on with it; None when it may not."""
        if w in computing:
            return "computes prompts too"
        if prefill.n_left <= self.config.local_prompt_tokens:
            return f"only {prefill.n_left} tokens are left to compute"
        if queued and not (w.running or w.waiting):
            return "idle, while every prefill worker has a queue"
        return None

    # -- explain ------------------------------------------------------------------------------------------------------------------

    def _why(
        self,
        request: RouteRequest,
        chosen: _Option,
        options: Sequence[_Option],
        held: dict[str, int],
        refused: dict[str, str],
    ) -> dict[str, Any]:
        p = chosen.prefill
        n_best = max(held.values(), default=0)
        why: dict[str, Any] = {
            "reason": "prefix held" if p.n_held else "prefix lent by a peer" if p.n_lent else "least loaded",
            "decode": chosen.reason,
            "tokens": request.n_prompt,
            "tokens_left": p.n_left,
            "pages_held": dict(held),
            "refused": refused,
            "options": [_numbers(o) for o in sorted(options, key=lambda o: o.total_s)[:8]],
            "miss": None,
        }
        n_start = max(p.n_held, p.n_lent)
        if n_start < n_best:
            why["miss"] = {
                "first_missing_page": n_start,
                "because": "the holder is dearer than computing it here",
            }
        elif n_best < len(request.names):
            dropper = self.index.was_dropped(request.names[n_best])
            why["miss"] = {
                "first_missing_page": n_best,
                "because": f"evicted by {dropper}" if dropper is not None else "not seen here with this salt",
                "salted": bool(request.salt),
            }
        behind = [w for w in held if self.index.is_behind(w)]
        if behind:
            why["index_behind"] = behind
        return why


def _numbers(o: _Option) -> dict[str, Any]:
    return {
        "worker": o.worker.worker_id,
        "decode": o.decode.worker_id if o.decode is not None else None,
        "pages_held": o.prefill.n_held,
        "pages_lent": o.prefill.n_lent,
        "queue_s": round(o.prefill.queue_s, 4),
        "compute_s": round(o.prefill.compute_s, 4),
        "move_s": round(o.prefill.move_s + o.hand_over_s, 4),
        "load_s": round(o.decode_s, 4),
        "total_s": round(o.total_s, 4),
    }
