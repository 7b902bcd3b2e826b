"""Workers and requests for tests of routing."""

from kilat.policy.route.router import Router
from kilat.policy.route.views import RouteRequest, WorkerView
from kilat.wire.messages import PagesChanged

PAGE_TOKENS = 16
RATE = 1000.0


def names(tag: str, n: int) -> list[bytes]:
    return [f"{tag}{i:06}".encode() for i in range(n)]


def view(worker_id: str, **options: object) -> WorkerView:
    """An idle worker with room that does both; options change it."""
    defaults = {"free_pages": 4096, "n_pages": 4096, "prefill_tokens_per_s": RATE, "step_s": 0.02}
    return WorkerView(worker_id, **{**defaults, **options})


def prefiller(worker_id: str, **options: object) -> WorkerView:
    return view(worker_id, **{"prefill_weight": 1.0, "decode_weight": 0.0, **options})


def decoder(worker_id: str, **options: object) -> WorkerView:
    return view(worker_id, **{"prefill_weight": 0.0, "decode_weight": 1.0, **options})


def request(session_id: str = "ses-1", n_pages: int = 64, tag: str = "p", **options: object) -> RouteRequest:
    """A prompt of so many full pages and one token."""
    return RouteRequest(session_id, n_pages * PAGE_TOKENS + 1, names(tag, n_pages), PAGE_TOKENS, **options)


def holding(router: Router, **depths: int) -> Router:
    """Tell the router that workers hold so many pages of the chain ``p``."""
    for worker_id, n in depths.items():
        router.index.apply(worker_id, PagesChanged(0, names("p", n), []))
    return router
