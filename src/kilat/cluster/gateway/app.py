"""The route table, and the application that is made of it."""

import time

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kilat.base.errors import KilatError
from kilat.cluster.config import LOOPBACK
from kilat.cluster.gateway import admin, health, models
from kilat.cluster.gateway.access import ADMIN, INFER, OBSERVE, OPEN, Endpoint
from kilat.cluster.gateway.chat import chat_completions
from kilat.cluster.gateway.completions import completions
from kilat.cluster.gateway.errors import error_response, on_bug, on_http_exception, on_kilat_error
from kilat.cluster.gateway.limits import check_host
from kilat.cluster.gateway.serving import ARRIVAL_S, TENANT, Gateway

# Every route is here, with what a client needs to use it.
ENDPOINTS = (
    Endpoint("/v1/chat/completions", "POST", INFER, chat_completions),
    Endpoint("/v1/completions", "POST", INFER, completions),
    Endpoint("/v1/models", "GET", INFER, models.list_models),
    Endpoint("/v1/models/{model_id:path}", "GET", INFER, models.get_model),
    Endpoint("/tokenize", "POST", INFER, models.tokenize),
    Endpoint("/detokenize", "POST", INFER, models.detokenize),
    Endpoint("/health/live", "GET", OPEN, health.live),
    Endpoint("/health/ready", "GET", OBSERVE, health.ready),
    Endpoint("/health", "GET", OBSERVE, health.ready),
    Endpoint("/health/progress", "GET", OBSERVE, health.progress),
    Endpoint("/metrics", "GET", OBSERVE, health.metrics),
    Endpoint("/cluster/workers", "GET", OBSERVE, admin.workers),
    Endpoint("/cluster/workers/{worker}/drain", "POST", ADMIN, admin.drain),
    Endpoint("/v1/cache/explain/{request_id}", "GET", INFER, admin.explain),
    Endpoint("/version", "GET", OBSERVE, health.version),
)


class Door:
    """What every request passes first: host check, API key, metrics. A path that is not in the table needs a key too."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway
        self._open_paths = frozenset(e.path for e in ENDPOINTS if e.scope == OPEN)
        self._routes = frozenset(e.path for e in ENDPOINTS)
        self._check_host = not gateway.keys and gateway.config.host in LOOPBACK

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        scope[ARRIVAL_S] = time.monotonic()
        path: str = scope["path"]
        # Only names from the table become labels, however many paths clients try.
        route = path if path in self._routes else "other"
        metrics = self._gateway.metrics

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                metrics.answered(route, scope["method"], message["status"])
            await send(message)

        try:
            headers = Headers(scope=scope)
            if self._check_host:
                check_host(headers.get("host"), self._gateway.config.host)
            if path not in self._open_paths:
                scope[TENANT] = self._gateway.keys.tenant(headers.get("authorization"))
        except KilatError as e:
            await error_response(e)(scope, receive, counted)
            return
        await self._app(scope, receive, counted)


def build_app(gateway: Gateway) -> ASGIApp:
    """The ASGI application of a gateway."""
    app = Starlette(
        routes=[Route(e.path, e.handler, methods=[e.method]) for e in ENDPOINTS],
        exception_handlers={KilatError: on_kilat_error, HTTPException: on_http_exception, Exception: on_bug},
    )
    app.router.redirect_slashes = False
    app.state.gateway = gateway
    return Door(app, gateway)
