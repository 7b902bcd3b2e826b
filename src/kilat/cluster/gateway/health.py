"""Three different questions: is this process there, can it serve, do its workers get on."""

from starlette.requests import Request
from starlette.responses import Response

from kilat import __version__
from kilat.cluster.gateway.errors import error_response, json_response
from kilat.cluster.gateway.serving import gateway_of


async def live(request: Request) -> Response:
    """This process answers."""
    return json_response({"status": "live"})


async def ready(request: Request) -> Response:
    """A new request would be served: 200, else 503 with the reason."""
    gateway = gateway_of(request)
    reason = gateway.why_not_ready()
    return json_response({"status": "ready"}) if reason is None else error_response(reason)


async def progress(request: Request) -> Response:
    """How far the workers are: step counters, the ages of the steps they are in, and whether they have work.

    The first fields are of all of them: sums, or of the one that is furthest behind. 503 when no worker gets on: none is there, or all
    are silent or in a step that takes too long.
    """
    gateway = gateway_of(request)
    fleet, config = gateway.fleet, gateway.config
    there = [w for w in fleet.workers if w.hello is not None]
    good = [
        w
        for w in there
        if fleet.silent_s(w) <= config.worker_timeout_s and w.step_age_s <= config.step_timeout_s
    ]
    states = {w.word for w in there}
    body = {
        "step": sum(w.status.step for w in there if w.status is not None) if there else None,
        "step_age_s": round(max((w.step_age_s for w in there), default=0.0), 3),
        "busy": any(w.status.busy for w in there if w.status is not None),
        "heard_s_ago": round(max((fleet.silent_s(w) for w in there), default=0.0), 3),
        "worker": "ready" if "ready" in states else "draining" if states else "none",
        "workers": {
            w.name: {
                "state": w.word,
                "step": w.status.step if w.status is not None else None,
                "step_age_s": round(w.step_age_s, 3),
                "heard_s_ago": round(fleet.silent_s(w), 3),
                "gets_on": w in good,
            }
            for w in fleet.workers
        },
    }
    return json_response(body, status=200 if good else 503)


async def metrics(request: Request) -> Response:
    """Prometheus' text form."""
    return Response(gateway_of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def version(request: Request) -> Response:
    """The version of kilat."""
    return json_response({"version": __version__})
