"""The end of a server: drained, hurried, killed, or never begun."""

import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from served import LONG, Served, Stream, alive, ask, errors_in, eventually

pytestmark = pytest.mark.cluster

Start = Callable[..., Served]
Streams = Callable[..., Stream]


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
    server = start(engine={"start": "exit"}, wait=False, backoff_s=60.0)
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


def test_model_without_a_tokenizer_is_an_error_and_not_a_hang(start: Start, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    server = start(wait=False, model_path=tmp_path / "empty")
    assert server.wait(30) != 0
    assert "tokenizer.json" in server.log()


def test_port_that_is_taken_is_an_error_and_not_a_hang(start: Start, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = start(wait=False, port=taken.getsockname()[1])
        assert server.wait(20) != 0
        assert "choose another --port" in server.log()
