"""Workers that die, hang, freeze or never start."""

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from served import LONG, Served, Stream, alive, ask, errors_in, eventually, text_of

pytestmark = pytest.mark.cluster

Start = Callable[..., Served]
Streams = Callable[..., Stream]


def test_requests_of_a_lone_worker_that_dies_go_on_when_it_is_back(start: Start, streams: Streams) -> None:
    server, story = start(engine={"step_s": 0.01}, backoff_s=0.05), {**LONG, "seed": 5}
    stream = streams(server, story)
    got = stream.read_some()
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(ask, server, "tell me", max_tokens=300, seed=6)
        eventually(lambda: server.metric("kilat_sessions_running") == 2, "both run")
        os.kill(server.worker_pid, signal.SIGKILL)
        answer = whole.result(30)
    got += stream.read_to_end()
    assert b"[DONE]" in got and errors_in(got) == []
    assert answer.status_code == 200
    assert server.metric("kilat_session_retries_total") == 2
    again = streams(server, story).read_to_end()
    assert said(got) == said(again) and len(said(again)) > 200
    assert text_of(answer) == text_of(ask(server, "tell me", max_tokens=300, seed=6))


def said(data: bytes) -> str:
    """The text of a stream."""
    lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: {")]
    return "".join(c["text"] for line in lines for c in json.loads(line)["choices"])


def test_killed_worker_ends_running_requests_with_a_retryable_error_when_they_may_not_wait(
    start: Start, streams: Streams
) -> None:
    server = start(engine={"step_s": 0.02}, backoff_s=0.05, rescue_s=0.0)
    stream = streams(server, LONG)
    stream.read_some()
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(ask, server, "tell me", max_tokens=450)
        eventually(lambda: server.metric("kilat_sessions_running") == 2, "both run")
        first = server.worker_pid
        os.kill(first, signal.SIGKILL)
        answer = whole.result(20)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "worker_lost"
    assert answer.json()["error"]["retryable"]
    assert "retry-after" in answer.headers
    data = stream.read_to_end()
    assert [(e["code"], e["retryable"]) for e in errors_in(data)] == [("worker_lost", True)]
    assert b"[DONE]" not in data
    eventually(lambda: httpx.get(f"{server.url}/health/ready").status_code == 200, "a new worker is ready")
    assert server.worker_pid != first
    assert text_of(ask(server)) == "fine"
    assert server.metric("kilat_worker_restarts_total") == 1


def test_requests_between_two_workers_are_told_to_come_back(start: Start) -> None:
    server = start(backoff_s=30.0, rescue_s=0.0)
    os.kill(server.worker_pid, signal.SIGKILL)
    eventually(lambda: ask(server).status_code == 503, "the gateway knows")
    answer = ask(server)
    assert int(answer.headers["retry-after"]) >= 1
    assert httpx.get(f"{server.url}/health/ready").status_code == 503
    assert httpx.get(f"{server.url}/health/live").status_code == 200
    assert httpx.get(f"{server.url}/health/progress").json()["worker"] == "none"


@pytest.mark.parametrize("prompt", ["crash!", "exit! tell me"])
def test_step_that_breaks_the_worker_each_time_is_an_error_and_the_next_request_works(
    start: Start, prompt: str
) -> None:
    server = start(backoff_s=0.05)
    answer = ask(server, prompt)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "request_kills_workers")
    assert server.metric("kilat_worker_restarts_total") <= 3
    eventually(lambda: ask(server).status_code == 200, "a new worker serves")


def test_worker_that_hangs_in_a_step_is_seen_killed_and_replaced(start: Start) -> None:
    server = start(backoff_s=0.05, step_timeout_s=1.0, status_interval_s=0.1)
    first = server.worker_pid
    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(ask, server, "hang!")

        def progress() -> dict[str, Any]:
            return httpx.get(f"{server.url}/health/progress").json()

        eventually(
            lambda: progress()["step_age_s"] > 0.3 and progress()["busy"],
            "progress shows the age of the step",
        )
        assert stuck.result(30).json()["error"]["code"] == "request_kills_workers"
    eventually(lambda: not alive(first), "the stuck worker is gone")
    eventually(lambda: ask(server).status_code == 200, "a new worker serves")


def test_frozen_worker_is_killed_and_replaced(start: Start) -> None:
    server = start(backoff_s=0.05, worker_timeout_s=1.0, status_interval_s=0.1)
    first = server.worker_pid
    os.kill(first, signal.SIGSTOP)
    eventually(lambda: not alive(first), "the frozen worker is gone")
    eventually(lambda: ask(server).status_code == 200, "a new worker serves")


def test_worker_that_dies_for_good_ends_the_server_with_an_error(start: Start) -> None:
    server = start(engine={"die_after_steps": 1}, backoff_s=0.01, max_failures=2)
    statuses = []
    deadline = time.monotonic() + 30
    while server.process.poll() is None and time.monotonic() < deadline:
        try:
            statuses.append(ask(server).status_code)
        except httpx.HTTPError:
            break
    assert server.wait(20) == 1
    assert set(statuses) == {503}
    assert "giving up: the worker died 2 times" in server.log()


@pytest.mark.parametrize(("how", "reason"), [("bad", "num_heads 0"), ("raise", "RuntimeError")])
def test_model_that_cannot_be_loaded_ends_the_server_at_once_with_its_reason(
    start: Start, how: str, reason: str
) -> None:
    server = start(engine={"start": how}, wait=False)
    assert server.wait(30) == 1
    assert reason in server.log().splitlines()[-1]
    assert server.log().count("worker_started") == 1


def test_worker_that_never_starts_is_tried_again_and_then_given_up(start: Start) -> None:
    server = start(engine={"start": "exit"}, wait=False, backoff_s=0.01, max_failures=2)
    assert server.wait(30) == 1
    assert server.log().count("worker_started") == 2
