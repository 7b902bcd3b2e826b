"""As many streams as one worker has places for, then none but one: what a server whose number of workers follows the traffic makes of them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from served import Served, Stream, eventually

from tests.policy.sched.fakes import alone, record

N_OUT = 150
PROMPT = list(range(40, 60))
SETTINGS: dict[str, Any] = {
    "workers": 1,
    "max_workers": 2,
    "ttft_slo_s": 10.0,
    "tpot_slo_s": 0.5,
    "grow_after_s": 0.5,
    "shrink_after_s": 1.0,
    "status_interval_s": 0.1,
    "engine": {"sched": {"n_pages": 1024, "max_model_len": 1000, "max_num_seqs": 4, "step_s": 0.05}},
}
FULL = {"prompt": [1, 2, 3], "ignore_eos": True, "max_tokens": 900, "stream": True}


def ready(server: Served) -> list[str]:
    return sorted(name for name, w in server.workers().items() if w["state"] == "ready")


def sessions(server: Served) -> dict[str, int]:
    return {name: w["sessions"] for name, w in server.workers().items()}


def fill(server: Served, streams: Callable[..., Stream]) -> list[Stream]:
    """Streams for all places of the one worker there is."""
    running = [streams(server, FULL) for _ in range(4)]
    assert all(s.read_some() for s in running)
    return running


def ride(server: Served, streams: Callable[..., Stream], *, start_s: float = 20.0) -> None:
    """A worker is added for the streams; when they are closed it is ended, and what it was writing goes on elsewhere with the same tokens."""
    first = server.pid_of("worker-0")
    running = fill(server, streams)
    eventually(lambda: ready(server) == ["worker-0", "worker-1"], "one is added", timeout_s=start_s)
    body = {"prompt": PROMPT, "seed": 7, "ignore_eos": True, "max_tokens": N_OUT}
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
        eventually(lambda: sessions(server) == {"worker-0": 4, "worker-1": 1}, "the new one has it")
        for s in running:
            s.close()
        eventually(lambda: sessions(server) == {"worker-0": 1}, "it goes on, and the new worker is ended")
        answer = late.result()
    tokens = [ord(c) for c in answer.json()["choices"][0]["text"]]
    assert tokens == alone(record("s", PROMPT, seed=7, max_tokens=N_OUT), 0, 1000)[0]
    log = server.log()
    assert server.pid_of("worker-0") == first, "the oldest stays"
    assert log.count("workers_added") == 1 and log.count("worker_drained") == 1 and "worker_died" not in log
