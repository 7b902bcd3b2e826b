"""Three different questions: is this process there, can it serve, does its worker get on."""

import time

from starlette.requests import Request
from starlette.responses import Response

from kilat import __version__
from kilat.base import metrics as names
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
    """How far the worker is: its step counter, the age of the step it is in, and whether it has work.

    503 when there is no worker, it is silent, or its step takes too long.
    """
    gateway = gateway_of(request)
    link, status = gateway.link, gateway.link.status
    silent_s = time.monotonic() - link.heard_at_s
    age_s = status.gauges.get(names.STEP_AGE, 0.0) if status is not None else 0.0
    good = (
        status is not None
        and silent_s <= gateway.config.worker_timeout_s
        and age_s <= gateway.config.step_timeout_s
    )
    body = {
        "step": status.step if status is not None else None,
        "step_age_s": round(age_s, 3),
        "busy": status.busy if status is not None else False,
        "heard_s_ago": round(silent_s, 3),
        "worker": "none" if link.hello is None else "draining" if not link.ready else "ready",
    }
    return json_response(body, status=200 if good and link.hello is not None else 503)


async def metrics(request: Request) -> Response:
    """Prometheus' text form."""
    return Response(gateway_of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def version(request: Request) -> Response:
    """The version of kilat."""
    return json_response({"version": __version__})
