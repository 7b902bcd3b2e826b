"""Prefill and decode apart, in real processes: pages that move, sessions that follow, and workers that die meanwhile.

What a worker says is computed from the bytes in its pages, so a page that is lost or mixed up on its way gives other tokens.
"""

import os
import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from served import Served, eventually

from tests.policy.sched.fakes import VOCAB, alone, record

pytestmark = pytest.mark.cluster

Start = Callable[..., Served]
SCHED = {"n_pages": 256, "max_model_len": 256, "max_num_seqs": 32, "step_s": 0.002}
N_OUT = 24


def prompt_of(n: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(VOCAB) for _ in range(n)]


def expected(prompt: list[int], *, n: int = 1, seed: int = 7) -> list[list[int]]:
    one = record("s", prompt, seed=seed, n=n, max_tokens=N_OUT)
    return [alone(one, k, 256)[0] for k in range(n)]


def generate(server: Served, prompt: list[int], **fields: Any) -> list[list[int]]:
    """Token ids of each choice: this tokenizer's tokens are bytes, and all of the fake model's are ASCII."""
    body = {"prompt": prompt, "seed": 7, "ignore_eos": True, "max_tokens": N_OUT, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return [[ord(c) for c in choice["text"]] for choice in answer.json()["choices"]]


def all_ready(server: Served, n: int) -> bool:
    workers = server.workers()
    return len(workers) == n and all(w["state"] == "ready" for w in workers.values())


def nothing_left(server: Served) -> None:
    """No session, no open move, and no page that is used or pinned."""

    def clean() -> bool:
        gauges = [w["gauges"] for w in server.workers().values()]
        return (
            server.metric("kilat_sessions_open") == server.metric("kilat_moves_open") == 0
            and all(g["pages_pinned"] == 0 for g in gauges)
            and all(g["sessions_running"] == g["sessions_waiting"] == 0 for g in gauges)
        )

    eventually(clean, "all sessions and pages are given back")


@pytest.mark.parametrize("n", [1, 4])
def test_handed_over_sessions_say_what_one_worker_says(start: Start, n: int) -> None:
    server = start(workers=0, prefill=1, decode=2, engine={"sched": SCHED})
    eventually(lambda: all_ready(server, 3), "all are ready")
    prompts = [prompt_of(140 + i, i) for i in range(12)]
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda p: generate(server, p, n=n), prompts))
    assert got == [expected(p, n=n) for p in prompts]
    assert server.metric("kilat_hand_overs_total") >= 1
    assert server.metric("kilat_moves_failed_total") == 0
    assert server.metric("kilat_moved_bytes_total") > 0
    assert server.metric("kilat_session_retries_total") == 0
    nothing_left(server)


def test_drained_workers_sessions_go_on_elsewhere_with_their_pages(start: Start) -> None:
    server = start(workers=2, engine={"sched": {**SCHED, "step_s": 0.02}})
    eventually(lambda: all_ready(server, 2), "both are ready")
    prompts = [prompt_of(40 + i, i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(generate, server, p) for p in prompts]
        eventually(lambda: server.workers()["worker-0"]["sessions"] >= 2, "it has sessions")
        told = httpx.post(f"{server.url}/cluster/workers/worker-0/drain", json={}, timeout=30).json()
        assert told["moved_sessions"] >= 1
        assert [a.result(60) for a in answers] == [expected(p) for p in prompts]
    assert server.metric("kilat_planned_moves_total") >= 1
    assert server.metric("kilat_session_retries_total") == 0
    nothing_left(server)


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_worker_that_dies_or_stops_amid_hand_overs_costs_no_token(
    start: Start, victim: str, how: signal.Signals
) -> None:
    options = {"worker_timeout_s": 1.0, "status_interval_s": 0.1, "backoff_s": 0.05}
    server = start(workers=0, prefill=2, decode=2, engine={"sched": SCHED}, **options)
    eventually(lambda: all_ready(server, 4), "all are ready")
    prompts = [prompt_of(120 + i, i) for i in range(32)]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(generate, server, p) for p in prompts]
        eventually(lambda: server.metric("kilat_hand_overs_total") >= 2, "hand-overs are under way")
        os.kill(server.pid_of(victim), how)
        assert [a.result(60) for a in answers] == [expected(p) for p in prompts]
    eventually(lambda: all_ready(server, 4), "the dead one is back")
    nothing_left(server)


def test_system_prompt_that_a_peer_has_computed_is_found(start: Start) -> None:
    server = start(workers=2, engine={"sched": {**SCHED, "step_s": 0.01}})
    eventually(lambda: all_ready(server, 2), "both are ready")
    system = prompt_of(160, 1)
    assert generate(server, [*system, 1, 2, 3]) == expected([*system, 1, 2, 3])
    prompts = [[*system, i, i, i] for i in range(10, 34)]
    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(lambda p: generate(server, p), prompts)) == [expected(p) for p in prompts]
    queried = server.metric("kilat_prefix_queried_tokens_total")
    assert server.metric("kilat_prefix_hit_tokens_total") > 0.8 * queried
    nothing_left(server)


def test_shares_follow_the_traffic_and_no_request_notices(start: Start) -> None:
    targets = {"ttft_slo_s": 0.02, "tpot_slo_s": 5.0}
    engine = {"sched": {**SCHED, "step_s": 0.01}}
    server = start(workers=0, prefill=1, decode=2, engine=engine, **targets)
    eventually(lambda: all_ready(server, 3), "all are ready")
    prompts = [prompt_of(180, i) for i in range(96)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda p: generate(server, p), prompts)) == [expected(p) for p in prompts]
    assert "roles worker=decode-" in server.log()
    assert sum(w["prefill_weight"] for w in server.workers().values()) > 1.0
    nothing_left(server)
