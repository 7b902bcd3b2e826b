"""What the operator sees and does: the workers, moving one out of the way, and why a prefix was not a hit."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kilat.base import metrics as names
from kilat.base.errors import NotFoundError, RequestError
from kilat.cluster.gateway.errors import json_response
from kilat.cluster.gateway.fleet import Fleet
from kilat.cluster.gateway.limits import read_json_body
from kilat.cluster.gateway.protocol import parse
from kilat.cluster.gateway.serving import TENANT, gateway_of


class DrainRequest(msgspec.Struct, forbid_unknown_fields=True):
    """``restart``: start a new worker in the place of the one that ends."""

    restart: bool = False


async def workers(request: Request) -> Response:
    """Every worker with its roles, pages and load, and the sums."""
    gateway = gateway_of(request)
    fleet = gateway.fleet
    totals = {
        "open_requests": gateway.n_open,
        "moves_open": len(fleet.dispatcher.moves),
        **{_short(name): value for name, value in fleet.dispatcher.counts.items()},
    }
    return json_response(
        {"model": gateway.config.served_model_name, "workers": worker_cards(fleet), "totals": totals}
    )


def worker_cards(fleet: Fleet) -> list[dict[str, Any]]:
    """What is known of each worker, as JSON values."""
    cards = []
    for w in fleet.workers:
        status = w.status
        counters = status.counters if status is not None else {}
        gauges = status.gauges if status is not None else {}
        cards.append(
            {
                "name": w.name,
                "id": w.worker_id,
                "state": w.word,
                "prefill_weight": w.prefill_weight,
                "decode_weight": w.decode_weight,
                "sessions": fleet.dispatcher.n_sessions(w.worker_id),
                "step": status.step if status is not None else None,
                "step_age_s": round(w.step_age_s, 3),
                "busy": status.busy if status is not None else False,
                "heard_s_ago": round(fleet.silent_s(w), 3),
                "n_pages": w.hello.n_pages if w.hello is not None else None,
                "transports": [e.transport for e in w.hello.endpoints] if w.hello is not None else [],
                "prefill_tokens_per_s": round(w.prefill_tokens_per_s, 1),
                "step_ms": round(w.step_s(gauges.get(names.SESSIONS_RUNNING, 0.0)) * 1e3, 2),
                "counters": {_short(name): counters.get(name, 0.0) for name in _COUNTERS},
                "gauges": {_short(name): gauges.get(name, 0.0) for name in _GAUGES},
            }
        )
    return cards


async def drain(request: Request) -> Response:
    """Move a worker's sessions to the others, then end its process; answered when it has ended."""
    gateway = gateway_of(request)
    ask = parse(await read_json_body(request), DrainRequest)
    worker = gateway.fleet.named(request.path_params["worker"])
    if worker is None:
        known = ", ".join(w.name for w in gateway.fleet.workers)
        raise NotFoundError(
            f"there is no worker {request.path_params['worker'][:64]!r}; there are {known}", param="worker"
        )
    if worker.hello is None or worker.retiring:
        raise RequestError(f"the worker {worker.name} is {worker.word}: only a ready one can be drained")
    moved = await gateway.drainer(worker, ask.restart)
    return json_response({"worker": worker.name, "moved_sessions": moved, "restarted": ask.restart})


async def explain(request: Request) -> Response:
    """Why the beginning of a request's prompt was or was not found in pages that exist, and who computed what."""
    gateway = gateway_of(request)
    request_id = request.path_params["request_id"]
    told = gateway.fleet.explanations.of(request_id, request.scope.get(TENANT, ""))
    if told is None:
        raise NotFoundError(
            f"nothing is known of the request {request_id[:64]!r}: it is not one of the latest, or not yours",
            param="id",
        )
    return json_response(told)


_COUNTERS = (
    names.PROMPT_TOKENS,
    names.OUTPUT_TOKENS,
    names.PREFIX_QUERIED_TOKENS,
    names.PREFIX_HIT_TOKENS,
    names.PREEMPTIONS,
    names.STEP_SECONDS,
)
_GAUGES = (
    names.SESSIONS_RUNNING,
    names.SESSIONS_WAITING,
    names.PAGES_FREE,
    names.PAGES_USED,
    names.PAGES_CACHED,
    names.PAGES_PINNED,
    names.PAGES_OFFERED,
    names.PAGES_MOVING,
    names.PAGES_QUARANTINED,
)


def _short(name: str) -> str:
    return name.removeprefix("kilat_").removesuffix("_total")
