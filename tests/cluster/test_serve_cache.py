"""``serve`` with a disk cache, in real processes: pages survive the pool, a drained server and a killed worker; a bad disk hurts nobody."""

import os
import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import Served, eventually

from kilat.cli.cache import explanation
from tests.policy.sched.fakes import VOCAB, alone, record

pytestmark = pytest.mark.cluster

Start = Callable[..., Served]
SCHED = {"n_pages": 80, "max_model_len": 256, "max_num_seqs": 8, "token_s": 1.0}
SYSTEM = [random.Random(99).randrange(VOCAB) for _ in range(120)]


def ask(server: Served, prompt: list[int]) -> dict[str, Any]:
    """An answer with the right tokens."""
    body = {"prompt": prompt, "seed": 7, "ignore_eos": True, "max_tokens": 6}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    one = record("s", prompt, seed=7, max_tokens=6)
    assert [ord(c) for c in told["choices"][0]["text"]] == alone(one, 0, 256)[0]
    return told


def fill(server: Served, seed: int) -> None:
    """Use the pool for other prompts."""
    for k in range(2):
        ask(server, [random.Random(100 * seed + k).randrange(VOCAB) for _ in range(200)])


def cached(told: dict[str, Any]) -> int:
    n: int = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    return n


def disk(tmp_path: Path, **options: Any) -> dict[str, Any]:
    return {"disk_cache_gb": 0.005, "disk_cache_dir": str(tmp_path / "cache"), **options}


def test_prefix_comes_back_from_disk_and_the_explanation_says_so(start: Start, tmp_path: Path) -> None:
    server = start(engine={"sched": SCHED}, **disk(tmp_path))
    ask(server, [*SYSTEM, 1])
    fill(server, 1)
    eventually(lambda: server.metric("kilat_tier_disk_written_bytes_total") > 0, "pages are written")
    told = ask(server, [*SYSTEM, 2])
    assert cached(told) == 120
    eventually(lambda: server.metric("kilat_tier_disk_hits_total") > 0, "the hit is counted")
    explained = httpx.get(f"{server.url}/v1/cache/explain/{told['id']}").json()
    (back,) = explained["prompts"][0]["recalled"]
    assert back["worker"] == "worker-0" and back["pages"]["disk"] > 0
    assert any("from its disk cache" in line for line in explanation(explained))


def test_drained_server_finds_its_pages_when_it_is_started_again(start: Start, tmp_path: Path) -> None:
    server = start(engine={"sched": SCHED}, **disk(tmp_path))
    ask(server, [*SYSTEM, 1])
    server.stop()
    again = start(engine={"sched": SCHED}, **disk(tmp_path))
    assert cached(ask(again, [*SYSTEM, 2])) == 120


def test_killed_workers_cache_is_right_or_empty(start: Start, tmp_path: Path) -> None:
    server = start(workers=2, engine={"sched": SCHED}, **disk(tmp_path, backoff_s=0.05, max_failures=50))
    eventually(lambda: all(w["state"] == "ready" for w in server.workers().values()), "both are ready")
    prompts = [[*SYSTEM[: 40 + 10 * (k % 8)], k] for k in range(24)]
    for round_ in range(3):
        with ThreadPoolExecutor(6) as pool:
            answers = [pool.submit(ask, server, p) for p in prompts]
            answers += [pool.submit(fill, server, 10 * round_ + k) for k in range(3)]
            eventually(lambda: server.workers()["worker-0"]["state"] == "ready", "it is ready")
            os.kill(server.pid_of("worker-0"), signal.SIGKILL)
            for a in answers:
                a.result(60)


def test_disk_that_cannot_be_used_is_a_warning(start: Start, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    server = start(engine={"sched": SCHED}, **disk(tmp_path))
    ask(server, [*SYSTEM, 1])
    fill(server, 1)
    ask(server, [*SYSTEM, 2])
    assert "is off from now on" in server.log()
