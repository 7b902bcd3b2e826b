"""What happens when something breaks: clients that leave or stall, workers that die or hang, and the end of the server."""

import json
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import Served, alive, eventually

pytestmark = pytest.mark.cluster

Start = Callable[..., Served]
# Much JSON per token, so that the buffers of the system between the two are full soon.
BULKY: dict[str, Any] = {"prompt": "tell me", "max_tokens": 100_000, "stream": True, "logprobs": 20}
LONG: dict[str, Any] = {"prompt": "tell me a long story", "max_tokens": 450, "stream": True}


def text_of(answer: httpx.Response) -> str:
    return answer.json()["choices"][0]["text"]


def ask(server: Served, prompt: str = "say:fine", **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt, **fields}, timeout=30)


class Stream:
    """A streamed request on a socket of its own, read only when asked."""

    def __init__(self, server: Served, body: dict[str, Any], *, buffer_bytes: int | None = None) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        if buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.socket.settimeout(30)
        self.socket.connect((host, int(port)))
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self.socket.sendall(head.encode() + data)

    def read_some(self) -> bytes:
        return self.socket.recv(4096)

    def read_to_end(self) -> bytes:
        """Until the end of the chunked body or of the connection."""
        got = b""
        while not got.endswith(b"0\r\n\r\n"):
            chunk = self.socket.recv(65536)
            if not chunk:
                break
            got += chunk
        return got

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def streams() -> Iterator[Callable[..., Stream]]:
    made: list[Stream] = []

    def make(*args: Any, **options: Any) -> Stream:
        made.append(Stream(*args, **options))
        return made[-1]

    yield make
    for stream in made:
        stream.close()


Streams = Callable[..., Stream]


def errors_in(data: bytes) -> list[dict[str, Any]]:
    found = re.findall(rb'data: (\{"error".*?\})\n\n', data)
    return [json.loads(f)["error"] for f in found]


# -- clients ----------------------------------------------------------------------------------------------------------------------


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
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"


def test_too_many_open_requests_are_a_429(start: Start, streams: Streams) -> None:
    server = start(engine={"step_s": 0.05}, max_requests=2)
    for _ in range(2):
        streams(server, LONG).read_some()
    answer = ask(server)
    assert answer.status_code == 429
    assert "limit 2" in answer.json()["error"]["message"]


# -- workers ----------------------------------------------------------------------------------------------------------------------


def test_killed_worker_ends_running_requests_with_a_retryable_error_and_comes_back(
    start: Start, streams: Streams
) -> None:
    server = start(engine={"step_s": 0.02}, backoff_s=0.05)
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
    server = start(backoff_s=30.0)
    os.kill(server.worker_pid, signal.SIGKILL)
    eventually(lambda: ask(server).status_code == 503, "the gateway knows")
    answer = ask(server)
    assert int(answer.headers["retry-after"]) >= 1
    assert httpx.get(f"{server.url}/health/ready").status_code == 503
    assert httpx.get(f"{server.url}/health/live").status_code == 200
    assert httpx.get(f"{server.url}/health/progress").json()["worker"] == "none"


@pytest.mark.parametrize("prompt", ["crash!", "exit! tell me"])
def test_step_that_breaks_the_worker_is_an_error_and_the_next_request_works(
    start: Start, prompt: str
) -> None:
    server = start(backoff_s=0.05)
    answer = ask(server, prompt)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_lost")
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
        assert stuck.result(20).status_code == 503
    eventually(lambda: not alive(first), "the stuck worker is gone")
    eventually(lambda: ask(server).status_code == 200, "a new worker serves")


def test_frozen_worker_is_killed_and_replaced(start: Start) -> None:
    server = start(backoff_s=0.05, worker_timeout_s=1.0, status_interval_s=0.1)
    first = server.worker_pid
    os.kill(first, signal.SIGSTOP)
    eventually(lambda: not alive(first), "the frozen worker is gone")
    eventually(lambda: ask(server).status_code == 200, "a new worker serves")


def test_worker_that_dies_for_good_ends_the_server_with_an_error(start: Start) -> None:
    server = start(engine={"die_after_steps": 1}, backoff_s=0.01, max_failures=3)
    statuses = []
    deadline = time.monotonic() + 30
    while server.process.poll() is None and time.monotonic() < deadline:
        try:
            statuses.append(ask(server).status_code)
        except httpx.HTTPError:
            break
    assert server.wait(20) == 1
    assert set(statuses) == {503}
    assert "giving up: the worker died 3 times" in server.log()


def test_model_that_cannot_be_loaded_ends_the_server_at_once_with_its_reason(start: Start) -> None:
    server = start(engine={"start": "bad"}, wait=False)
    assert server.wait(30) == 1
    assert "num_heads 0" in server.log()
    assert server.log().count("worker_started") == 1


def test_worker_that_never_starts_is_tried_again_and_then_given_up(start: Start) -> None:
    server = start(engine={"start": "raise"}, wait=False, backoff_s=0.01, max_failures=2)
    assert server.wait(30) == 1
    assert server.log().count("worker_started") == 2


# -- the end ----------------------------------------------------------------------------------------------------------------------


def test_sigterm_lets_running_answers_end_and_refuses_new_ones(start: Start, streams: Streams) -> None:
    server = start(engine={"step_s": 0.01})
    stream = streams(server, {**LONG, "max_tokens": 150})
    stream.read_some()
    worker = server.worker_pid
    server.terminate()
    eventually(lambda: "draining" in server.log(), "the drain began")
    refused = ask(server)
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert httpx.get(f"{server.url}/health/ready").status_code == 503
    data = stream.read_to_end()
    assert b"[DONE]" in data
    assert errors_in(data) == []
    assert server.wait(20) == 0
    assert not alive(worker)


def test_drain_deadline_cuts_what_is_left_with_an_error(start: Start, streams: Streams) -> None:
    server = start(engine={"step_s": 0.05}, drain_s=0.5)
    stream = streams(server, LONG)
    stream.read_some()
    server.terminate()
    data = stream.read_to_end()
    assert [(e["code"], e["retryable"]) for e in errors_in(data)] == [("overloaded", True)]
    assert server.wait(20) == 0


def test_second_signal_does_not_wait_for_answers(start: Start, streams: Streams) -> None:
    server = start(engine={"step_s": 0.05})
    stream = streams(server, LONG)
    stream.read_some()
    server.terminate()
    eventually(lambda: "draining" in server.log(), "the drain began")
    server.terminate()
    assert errors_in(stream.read_to_end())
    assert server.wait(20) == 0


def test_idle_connections_do_not_hold_up_the_end(start: Start) -> None:
    server = start()
    with httpx.Client(base_url=server.url) as http:
        assert http.get("/health/live").status_code == 200
        server.terminate()
        assert server.wait(20) == 0


def test_signal_while_the_model_loads_ends_the_server(start: Start) -> None:
    server = start(engine={"start": "raise"}, wait=False, backoff_s=60.0)
    eventually(lambda: "worker_died" in server.log(), "it waits to start the worker again")
    server.terminate()
    assert server.wait(20) == 0


def test_worker_does_not_outlive_a_killed_gateway(start: Start, streams: Streams) -> None:
    server = start()
    stream = streams(server, {**LONG, "prompt": "hang!"})
    eventually(lambda: server.metric("kilat_sessions_open") == 1, "the worker is in a step")
    worker = server.worker_pid
    server.process.kill()
    eventually(lambda: not alive(worker), "the worker is gone")
    stream.close()


def test_server_ends_when_its_standard_input_does(start: Start) -> None:
    server = start(stop_at_stdin_end=True)
    assert server.process.stdin is not None
    server.process.stdin.close()
    assert server.wait(20) == 0


def test_socket_and_secret_lie_in_a_private_folder_that_is_gone_afterwards(start: Start) -> None:
    with tempfile.TemporaryDirectory() as temp:
        server = start(env={"TMPDIR": temp})
        (folder,) = Path(temp).iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert [p.name for p in folder.iterdir()] == ["gateway"], "the worker's configuration must not stay"
        server.terminate()
        assert server.wait(20) == 0
        assert list(Path(temp).iterdir()) == []


def test_port_that_is_taken_is_an_error_and_not_a_hang(start: Start, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = start(wait=False, port=taken.getsockname()[1])
        assert server.wait(20) != 0
        assert "choose another --port" in server.log()


# -- leaks ------------------------------------------------------------------------------------------------------------------------


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
