"""Workers placed by Ray: what Ray's death and theirs mean for streams that run."""

import importlib.util
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from ray_head import GONE_AFTER, RayHead, named
from served import LONG, Served, Stream, alive, ask, errors_in, eventually, text_of
from stream_wave import SETTINGS, ride

RAY_S = 60.0
"""Ray starts a process of its own for an actor: seconds, and many of them on a busy machine."""
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]

Start = Callable[..., Served]
Streams = Callable[..., Stream]


def begin(start: Start, address: str, **options: Any) -> Served:
    """A server with two workers on this Ray, both ready."""
    server = start(
        workers=2,
        ray={"address": address},
        backoff_s=0.05,
        engine={"step_s": 0.03},
        env={"RAY_AUTH_MODE": "disabled", **GONE_AFTER},
        **options,
    )
    eventually(lambda: both_ready(server), "both are ready", timeout_s=RAY_S)
    return server


def both_ready(server: Served) -> bool:
    return [w["state"] for w in server.workers().values()] == ["ready"] * 2


def workers(server: Served) -> list[int]:
    return [server.pid_of("worker-0"), server.pid_of("worker-1")]


def begin_streams(server: Served, streams: Streams, **fields: Any) -> Callable[[], None]:
    """Four streams that have begun; the result reads them to the end and finds no error."""
    running = [streams(server, {**LONG, **fields}) for _ in range(4)]
    heads = [s.read_some() for s in running]

    def end() -> None:
        for head, s in zip(heads, running):
            data = head + s.read_to_end()
            assert errors_in(data) == [] and b"[DONE]" in data

    return end


def test_workers_and_actors_that_are_killed_come_back_and_streams_go_on(
    start: Start, streams: Streams
) -> None:
    server = begin(start, "auto")
    (driver,) = psutil.Process(server.process.pid).children()
    first = workers(server)

    end = begin_streams(server, streams, max_tokens=60)
    os.kill(first[0], signal.SIGKILL)
    end()
    assert "code=-9" in server.log(), "the log has the end as it was"
    eventually(lambda: server.log().count("worker_started") == 3, "a new one is started", timeout_s=RAY_S)
    eventually(lambda: both_ready(server), "both are ready", timeout_s=RAY_S)
    second = workers(server)
    assert second[0] != first[0] and second[1] == first[1]

    end = begin_streams(server, streams, max_tokens=60)
    actors = named(driver, "ray::WorkerHost")
    assert len(actors) >= 2, "Ray is the server's own"
    for actor in actors:
        actor.send_signal(signal.SIGKILL)
    end()
    eventually(lambda: server.log().count("worker_found") == 2, "Ray sees them again", timeout_s=RAY_S)
    assert workers(server) == second and all(alive(pid) for pid in second)

    # Nobody is left to end anybody: workers and Ray see for themselves, even in the middle of a step.
    stuck = streams(server, {**LONG, "prompt": "hang!"})
    eventually(lambda: server.metric("kilat_sessions_open") == 1, "a worker is in a step", timeout_s=RAY_S)
    of_ray = driver.children(recursive=True)
    server.process.kill()
    eventually(lambda: not any(alive(pid) for pid in second), "the workers are gone", timeout_s=RAY_S)
    eventually(
        lambda: not any(alive(p.pid) for p in [driver, *of_ray]),
        "so is Ray, which was started for them",
        timeout_s=RAY_S,
    )
    stuck.close()


def test_actor_is_added_for_more_streams_and_ends_when_it_is_not_needed(
    start: Start, streams: Streams, ray_head: RayHead
) -> None:
    server = start(
        **SETTINGS, ray={"address": ray_head.address}, env={"RAY_AUTH_MODE": "disabled", **GONE_AFTER}
    )
    ride(server, streams, start_s=RAY_S)
    eventually(
        lambda: len(named(ray_head.root, "ray::WorkerHost")) == 1, "its actor is gone", timeout_s=RAY_S
    )


def test_streams_do_not_notice_the_end_of_ray_and_workers_come_back_with_it(
    start: Start, streams: Streams, ray_head: RayHead
) -> None:
    server = begin(start, ray_head.address)
    before = workers(server)
    end = begin_streams(server, streams, max_tokens=250)
    ray_head.kill()
    try:
        eventually(lambda: "ray_lost" in server.log(), "the driver is gone", timeout_s=RAY_S)
        assert server.metric("kilat_sessions_running") == 4
        assert text_of(ask(server)) == "fine", "new requests are served too"
        end()
        assert workers(server) == before and all(alive(pid) for pid in before)
        os.kill(before[0], signal.SIGKILL)
        eventually(lambda: "lost: silent for" in server.log(), "its silence tells", timeout_s=RAY_S)
        assert text_of(ask(server)) == "fine"
    finally:
        ray_head.start()
    eventually(lambda: server.pid_of("worker-0") != before[0], "it is started again", timeout_s=60)
    eventually(lambda: "worker_found" in server.log(), "the other one is found again", timeout_s=RAY_S)
    server.terminate()
    assert server.wait(30) == 0
    assert not any(alive(pid) for pid in [*before, *workers(server)])
    eventually(lambda: not named(ray_head.root, "ray::WorkerHost"), "no actor is left", timeout_s=RAY_S)
