"""One gateway with several workers in real processes: deaths, drains, and what is told of each."""

import json
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from served import LONG, Served, Stream, alive, ask, errors_in, eventually, text_of

pytestmark = pytest.mark.cluster

Start = Callable[..., Served]
Streams = Callable[..., Stream]


def text_in(data: bytes) -> str:
    """The text of a stream."""
    found = [json.loads(d) for d in re.findall(rb"data: (\{.*?\})\r?\n", data)]
    return "".join(c["text"] for f in found for c in f["choices"])


def busy(server: Served) -> dict[str, int]:
    return {name: w["sessions"] for name, w in server.workers().items()}


def all_ready(server: Served) -> bool:
    return all(w["state"] == "ready" for w in server.workers().values())


def test_streams_survive_the_death_of_their_worker_and_say_the_same(start: Start, streams: Streams) -> None:
    server = start(workers=2, engine={"step_s": 0.01}, backoff_s=0.05)
    eventually(lambda: all_ready(server), "both are ready")
    asked = {**LONG, "max_tokens": 200, "seed": 5}
    expected = text_of(ask(server, LONG["prompt"], max_tokens=200, seed=5))
    running = [streams(server, asked) for _ in range(6)]
    heads = [s.read_some() for s in running]
    eventually(lambda: min(busy(server).values()) > 0, "both have sessions")
    os.kill(server.pid_of("worker-0"), signal.SIGKILL)
    whole = [head + s.read_to_end() for head, s in zip(heads, running)]
    for data in whole:
        assert errors_in(data) == []
        assert text_in(data) == expected
    assert server.metric("kilat_session_retries_total") >= 1
    eventually(lambda: all_ready(server), "the dead one is back")
    assert server.metric("kilat_worker_restarts_total") == 1


@pytest.mark.parametrize("prompt", ["crash!", "exit! tell me"])
def test_request_that_kills_workers_fails_alone(start: Start, streams: Streams, prompt: str) -> None:
    server = start(workers=2, engine={"step_s": 0.02}, backoff_s=0.05)
    good = [streams(server, {**LONG, "max_tokens": 400}) for _ in range(4)]
    heads = [s.read_some() for s in good]
    answer = ask(server, prompt)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "request_kills_workers")
    assert not answer.json()["error"]["retryable"]
    for head, s in zip(heads, good):
        data = head + s.read_to_end()
        assert errors_in(data) == [] and b"[DONE]" in data
    assert server.metric("kilat_sessions_poisoned_total") == 1


def test_drained_worker_ends_without_breaking_a_stream(start: Start, streams: Streams) -> None:
    server = start(workers=2, engine={"step_s": 0.02}, drain_s=2.0)
    eventually(lambda: all_ready(server), "both are ready")
    running = [streams(server, {**LONG, "max_tokens": 200}) for _ in range(4)]
    heads = [s.read_some() for s in running]
    pid = server.pid_of("worker-1")
    answer = httpx.post(f"{server.url}/cluster/workers/worker-1/drain", json={}, timeout=30)
    assert answer.status_code == 200 and answer.json()["moved_sessions"] >= 1
    assert not alive(pid)
    assert list(server.workers()) == ["worker-0"]
    for head, s in zip(heads, running):
        data = head + s.read_to_end()
        assert errors_in(data) == [] and b"[DONE]" in data
    last = httpx.post(f"{server.url}/cluster/workers/worker-0/drain", json={}, timeout=30)
    assert last.status_code == 503 and "no other worker" in last.json()["error"]["message"]
    assert text_of(ask(server)) == "fine"
    server.terminate()
    assert server.wait(20) == 0


def test_drained_worker_can_be_replaced(start: Start) -> None:
    server = start(workers=2)
    eventually(lambda: all_ready(server), "both are ready")
    before = server.pid_of("worker-0")
    answer = httpx.post(f"{server.url}/cluster/workers/worker-0/drain", json={"restart": True}, timeout=30)
    assert answer.json() == {"worker": "worker-0", "moved_sessions": 0, "restarted": True}
    eventually(lambda: len(server.workers()) == 2 and all_ready(server), "a new one is ready")
    assert server.pid_of("worker-0") != before
    assert server.metric("kilat_worker_restarts_total") == 0, "nothing died"


def test_server_goes_on_with_what_can_be_kept_alive_and_ends_with_the_last(start: Start) -> None:
    server = start(workers=2, max_failures=1)
    eventually(lambda: all_ready(server), "both are ready")
    os.kill(server.pid_of("worker-0"), signal.SIGKILL)
    eventually(lambda: "worker_given_up worker=worker-0" in server.log(), "the first is given up")
    assert text_of(ask(server)) == "fine"
    os.kill(server.pid_of("worker-1"), signal.SIGKILL)
    assert server.wait(20) == 1
    assert "giving up" in server.log()


def test_stop_after_one_worker_was_given_up_is_no_failure(start: Start) -> None:
    server = start(workers=2, max_failures=1)
    eventually(lambda: all_ready(server), "both are ready")
    os.kill(server.pid_of("worker-0"), signal.SIGKILL)
    eventually(lambda: "worker_given_up worker=worker-0" in server.log(), "the first is given up")
    server.terminate()
    assert server.wait(20) == 0


def test_workers_have_cores_of_their_own_and_roles(start: Start) -> None:
    server = start(workers=0, prefill=1, decode=1)
    eventually(lambda: len(server.workers()) == 2 and all_ready(server), "both are ready")
    told = server.workers()
    assert (told["prefill-0"]["prefill_weight"], told["prefill-0"]["decode_weight"]) == (1.0, 0.0)
    assert (told["decode-0"]["prefill_weight"], told["decode-0"]["decode_weight"]) == (0.0, 1.0)
    cores = [_cores(server.pid_of(name)) for name in ("prefill-0", "decode-0")]
    mine = os.sched_getaffinity(0)
    assert cores[0] | cores[1] == mine
    assert not cores[0] & cores[1] or len(mine) == 1
    assert text_of(ask(server)) == "fine", "without a way to move pages one worker does both"


def _cores(pid: int) -> set[int]:
    """Cores of all threads of a process."""
    return set().union(*(os.sched_getaffinity(int(t.name)) for t in Path(f"/proc/{pid}/task").iterdir()))


def test_metrics_and_progress_tell_of_each_worker(start: Start) -> None:
    server = start(workers=2)
    eventually(lambda: all_ready(server), "both are ready")
    assert server.metric("kilat_worker_up") == 2
    eventually(
        lambda: server.metric(r'kilat_worker_sessions_running\{worker="worker-1"\}') == 0, "its status came"
    )
    progress = httpx.get(f"{server.url}/health/progress").json()
    assert progress["worker"] == "ready"
    assert set(progress["workers"]) == {"worker-0", "worker-1"}
    assert all(w["gets_on"] for w in progress["workers"].values())


def test_explanation_names_the_worker_and_what_was_found(start: Start) -> None:
    server = start(workers=2)
    answers = [ask(server, "x" * 40, max_tokens=2) for _ in range(2)]
    told = httpx.get(f"{server.url}/v1/cache/explain/{answers[0].json()['id']}").json()
    (prompt,) = told["prompts"]
    assert (prompt["prompt_tokens"], prompt["cached_tokens"]) == (40, 0)
    assert prompt["routes"][0]["worker"] in ("worker-0", "worker-1")
    assert prompt["routes"][0]["why"]["reason"] == "least loaded"
    assert httpx.get(f"{server.url}/v1/cache/explain/cmpl-unknown").status_code == 404


def test_explanation_is_for_its_own_tenant_only(start: Start) -> None:
    keys = ["kl_alice_0123456789abcdef", "kl_bob_0123456789abcdef"]
    server = start(api_keys=keys)
    alice, bob = ({"authorization": f"Bearer {key}"} for key in keys)
    body = {"prompt": "say:hello"}
    made = httpx.post(f"{server.url}/v1/completions", json=body, headers=alice, timeout=30).json()["id"]
    assert httpx.get(f"{server.url}/v1/cache/explain/{made}", headers=alice).status_code == 200
    assert httpx.get(f"{server.url}/v1/cache/explain/{made}", headers=bob).status_code == 404


def test_many_requests_at_once_while_workers_die_all_end_well(start: Start) -> None:
    server = start(workers=3, engine={"step_s": 0.005}, backoff_s=0.05, max_failures=50)
    eventually(lambda: all_ready(server), "all are ready")
    expected = text_of(ask(server, "tell me", max_tokens=60, seed=3))
    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(ask, server, "tell me", max_tokens=60, seed=3) for _ in range(64)]
        for k in range(3):
            eventually(lambda: all_ready(server), "all are ready")
            os.kill(server.pid_of(f"worker-{k}"), signal.SIGKILL)
            eventually(lambda k=k: f"worker_died worker=worker-{k}" in server.log(), "it was noticed")
        done = [a.result(60) for a in answers]
    assert {a.status_code for a in done} == {200}
    assert {text_of(a) for a in done} == {expected}
    assert server.metric("kilat_sessions_open") == 0
