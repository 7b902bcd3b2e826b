"""The OpenAI-compatible client against a server that behaves and one that does not."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from kilat.base.errors import (
    AuthError,
    CapacityError,
    EngineError,
    KilatError,
    NotFoundError,
    PeerError,
    RequestError,
)
from kilat.cli.client import Chunk, Client, is_loopback
from kilat.cli.rows import CHAT, COMPLETIONS
from tests.cli.fake_server import Breaks, Drop, Fail, FakeServer, Hold, running

pytestmark = pytest.mark.cluster

ASK = {"model": "fake", "prompt": "hé\nllo"}
SAY = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(FakeServer()) as fake:
        yield fake


def stream(fake: FakeServer, path: str, body: dict[str, object]) -> list[Chunk]:
    async def collect() -> list[Chunk]:
        async with Client(fake.url, timeout_s=10) as client:
            return [chunk async for chunk in client.stream(path, body)]

    return asyncio.run(collect())


def complete(fake: FakeServer, path: str, body: dict[str, object]) -> dict[str, object]:
    async def post() -> dict[str, object]:
        async with Client(fake.url, timeout_s=10) as client:
            return (await client.complete(path, body)).body

    return asyncio.run(post())


@pytest.mark.parametrize(("path", "body", "said"), [(COMPLETIONS, ASK, "hé\nllo"), (CHAT, SAY, "hi")])
def test_stream_gives_text_finish_and_usage(
    path: str, body: dict[str, object], said: str, server: FakeServer
) -> None:
    chunks = stream(server, path, body)
    assert "".join(c.text for c in chunks) == f"You said {said}."
    assert [c.finish for c in chunks if c.finish] == ["stop"]
    usage = next(c.usage for c in chunks if c.usage)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (7, 3, 2)
    assert [c.at_s for c in chunks] == sorted(c.at_s for c in chunks)
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


def test_whole_answer_comes_with_status_and_request_id(server: FakeServer) -> None:
    async def post() -> tuple[int, str, object]:
        async with Client(server.url) as client:
            reply = await client.complete(CHAT, SAY)
            return reply.status, reply.request_id, reply.body["choices"]

    status, request_id, choices = asyncio.run(post())
    assert (status, request_id) == (200, "req-1") and "You said hi." in str(choices)


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        (400, RequestError, False),
        (401, AuthError, False),
        (403, AuthError, False),
        (404, NotFoundError, False),
        (408, PeerError, True),
        (422, RequestError, False),
        (429, CapacityError, True),
        (500, EngineError, False),
        (502, PeerError, True),
        (503, CapacityError, True),
        (504, PeerError, True),
    ],
)
@pytest.mark.parametrize("call", [stream, complete])
def test_status_becomes_one_of_our_errors(
    status: int, kind: type[KilatError], retryable: bool, call: object, server: FakeServer
) -> None:
    server.script = lambda body, nth: Fail(status, "prompt has 9 tokens, limit 8", "limit_exceeded")
    with pytest.raises(KilatError) as error:
        call(server, CHAT, SAY)  # type: ignore[operator]
    assert type(error.value) is kind
    assert (error.value.status, error.value.retryable) == (status, retryable)
    assert error.value.message == "prompt has 9 tokens, limit 8"


def test_retry_after_is_kept(server: FakeServer) -> None:
    server.script = lambda body, nth: Fail(429, headers={"retry-after": "7"})
    with pytest.raises(CapacityError) as error:
        complete(server, CHAT, SAY)
    assert error.value.retry_after_s == 7.0


def test_error_inside_a_stream_is_raised_after_its_text(server: FakeServer) -> None:
    server.script = lambda body, nth: Breaks("the worker died")
    with pytest.raises(EngineError, match="the worker died"):
        stream(server, CHAT, SAY)


def test_stream_that_ends_early_is_a_broken_protocol(server: FakeServer) -> None:
    server.script = lambda body, nth: Drop()
    with pytest.raises(PeerError, match="ended before"):
        stream(server, CHAT, SAY)


def test_dropped_connection_and_nobody_listening_are_peer_errors(server: FakeServer) -> None:
    server.script = lambda body, nth: Drop()
    with pytest.raises(PeerError, match="did not answer") as error:
        complete(server, CHAT, SAY)
    assert error.value.status == 0
    gone = FakeServer()
    with running(gone):
        pass
    with pytest.raises(PeerError, match=rf"server at {gone.url} did not answer .* is it running there\?"):
        complete(gone, CHAT, SAY)


@pytest.mark.parametrize(("status", "asks"), [(404, True), (500, False)])
def test_answer_without_an_error_of_the_api_is_told_with_its_address(
    status: int, asks: bool, server: FakeServer
) -> None:
    server.script = lambda body, nth: Fail(status, bare=True)
    with pytest.raises(KilatError) as error:
        complete(server, CHAT, SAY)
    said = error.value.message
    assert said.startswith(f"{server.url}{CHAT} answered HTTP status {status}")
    assert ("is this an OpenAI-compatible server?" in said) is asks


def test_server_that_says_nothing_is_given_up_after_the_timeout(server: FakeServer) -> None:
    hold = Hold(threading.Event())
    server.script = lambda body, nth: hold

    async def post() -> None:
        async with Client(server.url, timeout_s=0.2) as client:
            await client.complete(CHAT, SAY)

    with pytest.raises(PeerError, match="ReadTimeout"):
        asyncio.run(post())
    hold.event.set()


def test_leaving_a_stream_hangs_up_on_the_server(server: FakeServer) -> None:
    hold = Hold(threading.Event())
    server.script = lambda body, nth: hold

    async def first_word() -> str:
        async with Client(server.url) as client:
            async for chunk in client.stream(CHAT, SAY):
                return chunk.text
        return ""

    assert asyncio.run(first_word()) == "You "
    assert server.hung_up.wait(10)
    hold.event.set()


def test_models_are_listed_and_the_key_is_sent() -> None:
    async def ids(fake: FakeServer, key: str | None) -> list[str]:
        async with Client(fake.url, api_key=key) as client:
            return await client.model_ids()

    with running(FakeServer(key="kl_me_1", model="m7")) as fake:
        assert asyncio.run(ids(fake, "kl_me_1")) == ["m7"]
        with pytest.raises(AuthError, match="wrong key"):
            asyncio.run(ids(fake, None))


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:1", True),
        ("http://localhost:1", True),
        ("http://[::1]:1", True),
        ("http://10.0.0.1", False),
        ("http://example.org", False),
    ],
)
def test_only_loopback_goes_past_the_proxies(url: str, local: bool) -> None:
    assert is_loopback(url) is local
