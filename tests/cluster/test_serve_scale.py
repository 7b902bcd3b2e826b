"""The number of workers follows the traffic: processes of this host. ``test_serve_ray`` has it with Ray."""

import os
import signal
from collections.abc import Callable

import pytest
from served import Served, Stream, errors_in, eventually
from stream_wave import SETTINGS, fill, ready, ride

pytestmark = pytest.mark.cluster

Start = Callable[..., Served]
Streams = Callable[..., Stream]


def test_worker_is_added_for_more_streams_and_gives_its_own_away_when_it_is_not_needed(
    start: Start, streams: Streams
) -> None:
    ride(start(**SETTINGS), streams)


def test_added_worker_that_cannot_be_kept_alive_is_given_up_and_the_server_goes_on(
    start: Start, streams: Streams
) -> None:
    server = start(**{**SETTINGS, "backoff_s": 0.05, "max_failures": 2})
    running = fill(server, streams)
    eventually(lambda: "worker-1" in ready(server), "one is added")
    for n in (1, 2):
        pid = server.pid_of("worker-1")
        eventually(lambda: server.workers()["worker-1"]["state"] == "ready", "it is there")
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: server.log().count("worker_died") == n, "it is seen")
        if n == 1:
            eventually(lambda: server.pid_of("worker-1") != pid, "it is started again")
    eventually(lambda: "worker_given_up" in server.log(), "it is given up")
    assert ready(server) == ["worker-0"]
    assert all(errors_in(s.read_some()) == [] for s in running)
