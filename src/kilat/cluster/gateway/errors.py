"""Errors as OpenAI-shaped JSON, for answers that have not begun and for streams that have."""

import math
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kilat.base.errors import CapacityError, EngineError, KilatError, PeerError, RequestError
from kilat.base.log import get_logger

_log = get_logger("gateway")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_TEXTS = {
    404: "there is no such path here: GET /v1/models lists the model, the API is below /v1",
    405: "this path does not take that method",
}


def error_body(error: KilatError) -> dict[str, Any]:
    """``{"error": {...}}`` as OpenAI's clients read it. ``retryable`` says whether the same request may succeed later."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": error.code,
            "retryable": error.retryable,
        }
    }


def error_response(error: KilatError) -> Response:
    """The HTTP answer for ``error``, with Retry-After when trying again may help."""
    headers = {}
    if isinstance(error, CapacityError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif error.retryable:
        headers["retry-after"] = "1"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status == 413:
        headers["connection"] = "close"
    return json_response(error_body(error), status=error.status, headers=headers)


def json_response(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """``body`` (builtins or structs) as JSON."""
    return Response(
        msgspec.json.encode(body), status_code=status, headers=headers, media_type="application/json"
    )


def with_status(error: RequestError, status: int) -> RequestError:
    """The same error, answered with another 4xx status."""
    error.status = status
    return error


def from_peer(code: str, message: str, *, status: int | None = None, param: str | None = None) -> KilatError:
    """An error that another process reported, as the class of ``base.errors`` with that code."""
    kind = next((c for c in _tree(KilatError) if c.code == code), EngineError)
    if issubclass(kind, CapacityError):
        return CapacityError(message, status=status or kind.status)
    error = kind(message, param=param, code=code)
    if status is not None and 400 <= status <= 599:
        error.status = status
    return error


def _tree(root: type[KilatError]) -> Iterator[type[KilatError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _tree(kind)


def internal_error() -> KilatError:
    """What a client is told about a bug of ours: nothing but that it is ours."""
    return EngineError("the server failed on this request; its log says why", code="internal_error")


async def on_kilat_error(request: Request, error: Exception) -> Response:
    """Handler of all errors that kilat raises on purpose."""
    assert isinstance(error, KilatError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Handler of what the router raises: no such path, wrong method."""
    assert isinstance(error, HTTPException)
    text = _TEXTS.get(error.status_code, str(error.detail))
    code = (
        "not_found"
        if error.status_code == 404
        else "method_not_allowed"
        if error.status_code == 405
        else "bad_request"
    )
    response = error_response(with_status(RequestError(text, code=code), error.status_code))
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def on_bug(request: Request, error: Exception) -> Response:
    """Handler of everything else: logged with its traceback, told without."""
    _log.error("a request failed", exc_info=error)
    return error_response(internal_error())


def as_kilat_error(error: Exception) -> KilatError:
    """Any exception as one that may be shown to a client; a bug is logged."""
    if isinstance(error, KilatError):
        return error
    _log.error("a stream failed", exc_info=error)
    return internal_error()


def worker_died(reason: str) -> PeerError:
    """What running requests are told when their worker is gone."""
    return PeerError(
        f"the model's process {reason} while it answered; send the request again", code="worker_lost"
    )
