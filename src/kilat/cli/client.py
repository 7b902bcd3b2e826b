"""A small client of OpenAI-compatible servers: whole answers and streams, with kilat's own errors."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

import httpx
import msgspec

from kilat.base.errors import (
    AuthError,
    CapacityError,
    EngineError,
    KilatError,
    NotFoundError,
    PeerError,
    RequestError,
)
from kilat.cli.sse import SseSplitter

CONNECT_TIMEOUT_S = 10.0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Frame(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request, as the server reports them. ``cached_tokens``: prompt tokens from its
    prefix cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a stream. ``at_s`` is when it came (time.perf_counter); the last ones carry ``finish`` and
    ``usage``.
    """

    at_s: float
    text: str
    reasoning: str
    finish: str | None
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer: HTTP status, the server's request id (or an empty string) and the decoded body."""

    status: int
    request_id: str
    body: dict[str, Any]


class Client:
    """Talks to one server; an async context manager that owns its connections. Every method raises
    KilatError:

    AuthError 401/403, NotFoundError 404, CapacityError 429/503, RequestError for other 4xx, EngineError for
    other 5xx, and PeerError when the server cannot be reached, times out, or breaks the protocol. ``status``
    of the error is the HTTP status, 0 for none.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0, connections: int = 64
    ) -> None:
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            trust_env=not is_loopback(url),
        )
        self._frames = msgspec.json.Decoder(_Frame)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def model_ids(self) -> list[str]:
        """Names of the models that the server serves."""
        try:
            r = await self._http.get("/v1/models", timeout=CONNECT_TIMEOUT_S)
            reply = _reply(r)
            return [str(m["id"]) for m in reply.body["data"]]
        except (KeyError, TypeError) as e:
            raise _broken("its list of models has another form") from e
        except httpx.HTTPError as e:
            raise self._unreachable(e) from e

    async def get(self, path: str) -> dict[str, Any]:
        """The body of a GET."""
        try:
            return _reply(await self._http.get(path, timeout=CONNECT_TIMEOUT_S)).body
        except httpx.HTTPError as e:
            raise self._unreachable(e) from e

    async def complete(self, path: str, body: dict[str, Any]) -> Reply:
        """POST ``body``; the whole answer."""
        try:
            return _reply(await self._http.post(path, json=body))
        except httpx.HTTPError as e:
            raise self._unreachable(e) from e

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[Chunk]:
        """POST ``body`` as a stream with usage; closing the iterator cancels the request on the server."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        splitter = SseSplitter()
        try:
            async with self._http.stream("POST", path, json=body) as r:
                if r.status_code != 200:
                    await r.aread()
                    _reply(r)
                async for data in r.aiter_raw() if "content-encoding" not in r.headers else r.aiter_bytes():
                    now = time.perf_counter()
                    for payload in splitter.push(data):
                        if payload == b"[DONE]":
                            return
                        yield self._chunk(payload, now)
        except httpx.HTTPError as e:
            raise self._unreachable(e) from e
        raise _broken("the stream ended before [DONE]")

    def _unreachable(self, e: httpx.HTTPError) -> PeerError:
        why = f"{type(e).__name__} {e}".rstrip()
        where = str(self._http.base_url).rstrip("/")
        hint = ": is it running there?" if isinstance(e, httpx.ConnectError) else ""
        made = PeerError(f"the server at {where} did not answer ({why}){hint}", code="unreachable")
        made.status = 0
        return made

    def _chunk(self, payload: bytes, now: float) -> Chunk:
        try:
            frame = self._frames.decode(payload)
        except msgspec.MsgspecError as e:
            raise _broken(f"an event could not be read ({e})") from e
        if frame.error is not None:
            raise _error(_status_of(frame.error), frame.error, None)
        text = reasoning = ""
        finish = None
        for choice in frame.choices:
            text += choice.text or (choice.delta.content if choice.delta else None) or ""
            reasoning += (choice.delta.reasoning_content if choice.delta else None) or ""
            finish = choice.finish_reason or finish
        usage = None
        if frame.usage is not None:
            details = frame.usage.prompt_tokens_details
            cached = (details.cached_tokens if details else None) or 0
            usage = Usage(frame.usage.prompt_tokens, frame.usage.completion_tokens, cached)
        return Chunk(now, text, reasoning, finish, usage)


def is_loopback(url: str) -> bool:
    """Whether the URL's host is this machine: such requests never go through a proxy."""
    host = httpx.URL(url).host
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _reply(r: httpx.Response) -> Reply:
    try:
        body = msgspec.json.decode(r.content)
    except msgspec.MsgspecError:
        body = None
    if r.status_code != 200:
        raise _error(r.status_code, body.get("error") if isinstance(body, dict) else None, r)
    if not isinstance(body, dict):
        raise _broken("the answer is not a JSON object")
    return Reply(r.status_code, r.headers.get("x-request-id", ""), body)


def _error(status: int, error: Any, r: httpx.Response | None) -> KilatError:
    """The error of base/errors for an HTTP status and an OpenAI-shaped ``error`` object (or anything
    else).
    """
    fields = error if isinstance(error, dict) else {}
    message = str(fields.get("message") or error or _strange(status, r))[:2000]
    if status in (429, 503):
        wait = r.headers.get("retry-after", "") if r is not None else ""
        return CapacityError(message, retry_after_s=float(wait) if wait.isdecimal() else 1.0, status=status)
    kind: type[KilatError] = RequestError if 400 <= status < 500 else EngineError
    kind = {
        401: AuthError,
        403: AuthError,
        404: NotFoundError,
        408: PeerError,
        502: PeerError,
        504: PeerError,
    }.get(status, kind)
    made = kind(message, param=fields.get("param"), code=str(fields["code"]) if fields.get("code") else None)
    made.status = status
    return made


def _strange(status: int, r: httpx.Response | None) -> str:
    """What to say of an answer that carries no error object of the API."""
    if r is None:
        return f"HTTP status {status}"
    hint = ": is this an OpenAI-compatible server?" if status in (404, 405, 501) else ""
    return f"{r.request.url} answered HTTP status {status}{hint}"


def _status_of(error: Any) -> int:
    """HTTP status of an error inside a stream, whose own status was already 200."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _broken(what: str) -> PeerError:
    made = PeerError(f"the server broke the protocol: {what}", code="bad_answer")
    made.status = 0
    return made
