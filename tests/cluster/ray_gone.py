"""Ray, which has placed the workers of a server, is killed while streams run, and comes back after a while."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.cluster.fault_run import Outcome
from tests.cluster.ray_head import GONE_AFTER, RayHead
from tests.cluster.served import Served, eventually
from tests.cluster.tiny_model import write_tiny_model
from tests.policy.sched.fakes import VOCAB, alone, record

N_STREAMS = 8
STEP_S = 0.1
RAY_S = 90.0


def ray_gone(folder: Path, gone_s: float) -> Outcome:
    """Streams that begin before Ray is killed and end after it has come back, and a short request every second in between."""
    out = Outcome("Ray", f"gone for {gone_s:g} s", trials=1)
    n_out = round((gone_s + 10) / STEP_S)
    (folder / "tiny").mkdir()
    (folder / "server").mkdir()
    head = RayHead()
    try:
        server = Served(
            folder / "server",
            write_tiny_model(folder / "tiny").path,
            workers=2,
            ray={"address": head.address},
            backoff_s=0.05,
            engine={"sched": {"n_pages": 2048, "max_model_len": n_out + 64, "step_s": STEP_S}},
            env={"RAY_AUTH_MODE": "disabled", **GONE_AFTER},
        )
        try:
            _measure(out, head, server, gone_s, n_out)
        finally:
            server.stop()
    finally:
        head.stop()
    return out


def _measure(out: Outcome, head: RayHead, server: Served, gone_s: float, n_out: int) -> None:
    eventually(
        lambda: [w["state"] for w in server.workers().values()] == ["ready"] * 2, "ready", timeout_s=RAY_S
    )
    began_s = time.monotonic()
    with ThreadPoolExecutor(N_STREAMS) as pool:
        answers = [pool.submit(_ask, out, server, seed, n_out) for seed in range(N_STREAMS)]
        eventually(lambda: server.metric("kilat_sessions_running") == N_STREAMS, "all run", timeout_s=30)
        head.kill()
        until_s = time.monotonic() + gone_s
        k = N_STREAMS
        while time.monotonic() < until_s:
            _ask(out, server, k, 3)
            k += 1
            time.sleep(min(1.0, max(0.0, until_s - time.monotonic())))
        out.hits = int("ray_lost" in server.log() and not any(a.done() for a in answers))
        head.start()
        for a in answers:
            a.result(gone_s + 120)
    out.worst_s = time.monotonic() - began_s
    out.retries = int(server.metric("kilat_session_retries_total"))
    for name in ("kilat_sessions_open", "kilat_moves_open"):
        if server.metric(name):
            out.leaks += 1
            out.note(f"{name} is {server.metric(name):g}")


def _ask(out: Outcome, server: Served, seed: int, n_out: int) -> None:
    prompt = [(seed * 7 + k) % VOCAB for k in range(30)]
    body = {"prompt": prompt, "seed": seed, "ignore_eos": True, "max_tokens": n_out, "stream": True}
    out.requests += 1
    try:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=600, trust_env=False)
    except httpx.HTTPError as e:
        out.failed += 1
        out.note(f"request {seed}: {type(e).__name__}")
        return
    events = [json.loads(e) for e in re.findall(r"^data: (\{.*\})$", answer.text, re.MULTILINE)]
    text = "".join(c["text"] for e in events for c in e.get("choices", ()))
    want = alone(record("s", prompt, seed=seed, max_tokens=n_out), 0, 4096)[0]
    if answer.status_code != 200 or any("error" in e for e in events):
        out.failed += 1
        out.note(f"request {seed}: {answer.text[-300:]}")
    elif [ord(c) for c in text] != want:
        out.wrong += 1
        out.note(f"request {seed}: {len(text)} of {len(want)} tokens, or others")
