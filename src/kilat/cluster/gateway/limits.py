"""What a client may make large before anything else looks at it: the body of a request, and the time it takes to send it."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from kilat.base.errors import LimitError, RequestError
from kilat.cluster.config import LOOPBACK, MAX_BODY_BYTES
from kilat.cluster.gateway.errors import with_status

BODY_TIMEOUT_S = 30.0
DISCARD_BYTES = 8 * MAX_BODY_BYTES


async def read_json_body(request: Request) -> bytes:
    """The whole body. Raises RequestError when it is not declared as JSON, is too large, or takes too long to arrive."""
    _check_type(request)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await _read(request)
    except TimeoutError as e:
        raise with_status(LimitError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s"), 408) from e
    except ClientDisconnect as e:
        raise RequestError("the client closed the connection before the body was complete") from e
    if body is None:
        raise with_status(LimitError(f"the body is too large, limit {MAX_BODY_BYTES:,} bytes"), 413)
    return body


async def _read(request: Request) -> bytes | None:
    """The body, or None when it is too large.

    The rest of one that is too large is read and dropped, within reason: a client that is still sending when the connection closes
    would never see the answer.
    """
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > DISCARD_BYTES:
            return None
        if size <= MAX_BODY_BYTES:
            chunks.append(chunk)
        else:
            chunks.clear()
    if size > MAX_BODY_BYTES:
        return None
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _check_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also keeps web pages out: a browser sends other types to foreign servers without asking them first.
        raise with_status(
            RequestError(
                f"the content type is {kind[:64]!r}: send the header Content-Type: application/json"
            ),
            415,
        )
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise with_status(
            RequestError(f"the content encoding is {coding[:64]!r}: send the body as it is"), 415
        )


def check_host(host_header: str | None, own_host: str) -> None:
    """For a server on loopback without keys: refuse requests that name another host.

    A web page whose name was made to point to 127.0.0.1 could otherwise use the model and read its answers.
    """
    name = (host_header or "").rpartition(":")[0] if _has_port(host_header or "") else (host_header or "")
    if name.strip("[]").lower() not in (*LOOPBACK, own_host):
        raise with_status(
            RequestError(
                "the Host header does not name this server: use 127.0.0.1 or localhost, or start with --api-key"
            ),
            421,
        )


def _has_port(host: str) -> bool:
    name, colon, port = host.rpartition(":")
    return bool(colon) and port.isdigit() and (not name.count(":") or name.endswith("]"))
