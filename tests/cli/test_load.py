"""Timing of single streams."""

import asyncio
from collections.abc import Callable

import pytest

from kilat.cli.client import Client
from kilat.cli.load import open_loop, stream_one
from kilat.cli.measures import Sample
from kilat.cli.server import Target
from kilat.cli.workload import Request
from tests.cli import fake_server
from tests.cli.fake_server import Drop, Fail, FakeServer, running

pytestmark = pytest.mark.cluster


def sample(fake: FakeServer) -> Sample:
    async def one() -> Sample:
        async with Client(fake.url, timeout_s=10) as client:
            return await stream_one(client, "fake", Request("hi", 3), None)

    return asyncio.run(one())


def speaking(words: list[str]) -> Callable[[dict[str, object]], list[str]]:
    return lambda body: words


def test_stream_has_a_time_for_each_text_and_the_servers_counts() -> None:
    with running(FakeServer()) as fake:
        s = sample(fake)
    assert s.error is None and len(s.event_s) == 3
    assert (s.input_tokens, s.output_tokens, s.cached_tokens) == (7, 3, 2)
    assert s.arrival_s == s.sent_s <= s.event_s[0] <= s.event_s[-1] <= s.done_s


def test_tokens_without_text_of_their_own_end_with_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(FakeServer()) as fake:
        monkeypatch.setattr(fake_server, "words_of", speaking(["a", "", "b", ""]))
        some = sample(fake)
        monkeypatch.setattr(fake_server, "words_of", speaking(["", ""]))
        none = sample(fake)
    assert some.error is None and (len(some.event_s), some.output_tokens) == (3, 4)
    assert none.error is None and (len(none.event_s), none.output_tokens) == (1, 2)


def test_answer_without_tokens_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_server, "words_of", speaking([]))
    with running(FakeServer()) as fake:
        assert sample(fake).error == "empty: the answer has no tokens"


def test_failed_and_broken_streams_are_samples_with_a_reason() -> None:
    with running(FakeServer()) as fake:
        fake.script = lambda body, nth: Fail(503, "full", "overloaded") if nth == 0 else Drop()
        assert sample(fake).error == "overloaded: full"
        broken = sample(fake)
    assert broken.error is not None and broken.error.startswith("bad_answer") and len(broken.event_s) == 1


def test_open_loop_returns_samples_in_order_of_requests_with_their_arrivals() -> None:
    done: list[int] = []
    arrivals = [0.0, 0.05, 0.1]
    with running(FakeServer()) as fake:
        target = Target(fake.url, "fake", "fake")
        requests = [Request(f"p{i}", 3) for i in range(3)]
        samples = asyncio.run(open_loop(target, requests, arrivals, lambda: done.append(1)))
    first = samples[0].arrival_s
    assert [s.arrival_s - first for s in samples] == pytest.approx(arrivals)
    assert all(s.sent_s >= s.arrival_s for s in samples) and len(done) == 3
