"""Clients that leave, stall, come too often or wait too long."""

import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from served import BULKY, LONG, Served, Stream, ask, errors_in, eventually, text_of

pytestmark = pytest.mark.cluster

Start = Callable[..., Served]
Streams = Callable[..., Stream]


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_frees_its_session(start: Start, streams: Streams, stream: bool) -> None:
    server = start(engine={"step_s": 0.02})
    client = streams(server, {**LONG, "stream": stream, "n": 3})
    eventually(lambda: server.metric("kilat_sessions_running") == 3, "three samples run")
    client.close()
    eventually(lambda: server.metric("kilat_sessions_finished_abort_total") == 3, "the worker stopped them")
    assert server.metric("kilat_sessions_open") == 0
    assert server.metric("kilat_requests_open") == 0


def test_client_that_leaves_while_it_waits_in_the_queue_frees_its_place(
    start: Start, streams: Streams
) -> None:
    server = start(engine={"step_s": 0.02, "max_num_seqs": 1})
    streams(server, LONG).read_some()
    waiting = streams(server, LONG)
    eventually(lambda: server.metric("kilat_sessions_waiting") == 1, "one waits")
    waiting.close()
    eventually(lambda: server.metric("kilat_sessions_finished_abort_total") == 1, "it left the queue")


def test_stop_string_frees_the_session_of_its_sample_only(start: Start) -> None:
    server = start()
    answer = ask(server, "tell me", n=3, seed=4, max_tokens=300, stop=["moon"]).json()
    assert {c["finish_reason"] for c in answer["choices"]} == {"stop"}
    eventually(lambda: server.metric("kilat_sessions_running") == 0, "nothing runs on")


def test_reader_that_stalls_is_cut_and_others_go_on(start: Start, streams: Streams) -> None:
    server = start(engine={"max_model_len": 400_000}, max_lag_tokens=500, max_lag_s=1.0)
    stalled = streams(server, BULKY, buffer_bytes=4096)
    assert b"200 OK" in stalled.read_some()
    eventually(lambda: server.metric("kilat_slow_readers_total") == 1, "the stalled reader was noticed")
    assert text_of(ask(server)) == "fine"
    eventually(lambda: server.metric("kilat_requests_open") == 0, "its request ended")
    eventually(lambda: server.metric("kilat_sessions_finished_abort_total") == 1, "its session ended")


def test_reader_that_stalls_for_a_moment_is_told_why_it_was_cut(start: Start, streams: Streams) -> None:
    server = start(engine={"max_model_len": 400_000}, max_lag_tokens=500, max_lag_s=60.0)
    stalled = streams(server, BULKY, buffer_bytes=4096)
    eventually(lambda: server.metric("kilat_slow_readers_total") == 1, "the stalled reader was noticed")
    data = stalled.read_to_end()
    assert [e["code"] for e in errors_in(data)] == ["overloaded"]
    assert b"[DONE]" not in data
    assert data.endswith(b"0\r\n\r\n")


def test_silent_stream_shows_signs_of_life(start: Start, streams: Streams) -> None:
    server = start(engine={"step_s": 0.1, "max_num_seqs": 1}, silence_s=0.3)
    streams(server, {**LONG, "max_tokens": 20}).read_some()
    data = streams(server, {**LONG, "prompt": "say:x"}).read_to_end()
    assert data.startswith(b"HTTP/1.1 200 OK")
    assert b": still working\n\n" in data
    assert data.rstrip().endswith(b"0") and b"[DONE]" in data


def test_request_over_its_time_is_stopped(start: Start, streams: Streams) -> None:
    server = start(engine={"step_s": 0.05}, request_timeout_s=0.5)
    whole = ask(server, "tell me", max_tokens=400)
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert whole.json()["error"]["retryable"]
    data = streams(server, LONG).read_to_end()
    assert [e["code"] for e in errors_in(data)] == ["deadline_exceeded"]
    eventually(lambda: server.metric("kilat_sessions_running") == 0, "both were stopped in the worker")


def test_full_queue_is_a_429_with_retry_after(start: Start, streams: Streams) -> None:
    server = start(engine={"step_s": 0.05, "max_num_seqs": 1, "max_waiting": 1})
    for _ in range(2):
        streams(server, LONG)
    eventually(lambda: server.metric("kilat_sessions_waiting") == 1, "the queue is full")
    for stream in (True, False):
        answer = ask(server, stream=stream)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "3", "what the engine said"
        assert answer.json()["error"]["type"] == "rate_limit_error"


def test_too_many_open_requests_are_a_429(start: Start, streams: Streams) -> None:
    server = start(engine={"step_s": 0.05}, max_requests=2)
    for _ in range(2):
        streams(server, LONG).read_some()
    answer = ask(server)
    assert answer.status_code == 429
    assert "limit 2" in answer.json()["error"]["message"]


def test_five_hundred_cancelled_requests_leave_nothing_behind(start: Start) -> None:
    server = start(engine={"step_s": 0.002})

    def numbers() -> tuple[float, float, float, float]:
        names = ("kilat_gateway_tasks", "process_open_fds", "kilat_sessions_open", "kilat_requests_open")
        tasks, fds, sessions, requests = (server.metric(n) for n in names)
        return tasks, fds, sessions, requests

    ask(server)
    before = numbers()
    gate = threading.Semaphore(16)

    def cancel_one(k: int) -> None:
        with gate:
            body = {**LONG, "n": 1 + k % 3, "stream": k % 4 != 0}
            stream = Stream(server, body)
            if k % 2 and body["stream"]:
                stream.read_some()
            else:
                time.sleep(0.001 * (k % 7))
            stream.close()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(cancel_one, range(500)))
    eventually(lambda: server.metric("kilat_requests_open") == 0, "all requests ended")
    eventually(lambda: server.metric("kilat_sessions_running") == 0, "all sessions ended in the worker")
    eventually(
        lambda: numbers() == before,
        f"tasks, descriptors and sessions are as before: {before}, now {numbers()}",
    )
    assert text_of(ask(server)) == "fine"


def test_thousand_streams_at_once_lose_nothing(start: Start, streams: Streams) -> None:
    server = start(workers=2, engine={"max_num_seqs": 1024, "step_s": 0.2})
    eventually(lambda: server.metric("kilat_worker_up") == 2, "both workers are there")
    expected = text_of(ask(server, "tell me", max_tokens=40, seed=1, temperature=0))
    body = {"prompt": "tell me", "max_tokens": 40, "seed": 1, "temperature": 0, "stream": True}
    before = server.metric("process_resident_memory_bytes")
    many = [streams(server, body) for _ in range(1000)]
    eventually(lambda: server.metric("kilat_requests_open") >= 900, "they are open together")
    for stream in many:
        data = stream.read_to_end()
        assert errors_in(data) == [] and b"[DONE]" in data
        found = re.findall(rb'"text":"((?:[^"\\\\]|\\\\.)*)"', data)
        assert "".join(json.loads(b'"' + f + b'"') for f in found) == expected
    assert server.metric("process_resident_memory_bytes") - before < 200 * 2**20
    eventually(lambda: server.metric("kilat_requests_open") == 0, "all are over")
    assert server.metric("kilat_session_retries_total") == 0
