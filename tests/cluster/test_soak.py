"""A mixed load on the whole system: gateway, worker and engine around a tiny model, with far fewer pages than its sessions would like.

bench/soak.py sends the same traffic to a real model for longer, and watches the memory too.
"""

import asyncio
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.whole_model import write_model
from tests.cluster.soak_run import Clients, Server, Tally, leaks, wait_until
from tests.cluster.soak_traffic import CANCELS, JSON_TYPE, TEXT, Ask, Traffic, what_is_wrong

pytestmark = pytest.mark.cluster

WARM_UP, REQUESTS, CLIENTS = 60, 300, 16
PAGES = 34  # of 16 tokens and 8 KiB; one session may have 32


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("soak") / "log"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[Server]:
    model = write_model(log.parent)
    command = [sys.executable, "-m", "kilat.cli", "serve", str(model), "--port", "0", "--stop-at-stdin-end"]
    command += ["--kernels", "reference", "--threads", "1", "--served-model-name", "tiny"]
    command += ["--kv-cache-memory-bytes", f"{PAGES * 8}KiB", "--max-num-seqs", "12"]
    environment = {**os.environ, "KILAT_LOG": "warning"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=environment)
    try:
        ready = re.compile(r"^ready: .* at (http://\S+)/v1", re.MULTILINE)
        assert wait_until(lambda: ready.search(log.read_text()) is not None, 60), log.read_text()
        found = ready.search(log.read_text())
        assert found is not None
        server = Server(found[1], process.pid)
        yield server
        server.close()
    finally:
        process.kill()
        process.wait(30)
        assert process.stdin is not None
        process.stdin.close()


def send(server: Server, traffic: Traffic, count: int) -> Tally:
    tally = Tally()
    asyncio.run(Clients(server.url, traffic, tally, CLIENTS).run(0, count))
    return tally


@pytest.mark.timeout(180)
def test_mixed_load_is_answered_right_and_leaves_nothing_behind(server: Server, log: Path) -> None:
    warm = send(server, Traffic(1, "tiny", context_words=1000), WARM_UP)
    assert wait_until(lambda: server.is_idle(server.metrics()), 30), "not idle after the warm-up"
    before = server.holdings()
    tally = send(server, Traffic(0, "tiny", context_words=1000), REQUESTS)
    assert warm.problems == [] and tally.problems == []
    assert tally.done == REQUESTS and tally.repeats > 10
    assert leaks(server, before, timeout_s=30) == []
    m = server.metrics()
    assert m["kilat_pages_free"] + m["kilat_pages_cached"] == PAGES
    assert m["kilat_sessions_finished_abort_total"] > 5, "sessions of clients that left ran on to their end"
    assert m["kilat_preemptions_total"] > 0, "the pool was never too small: this tests less than it should"
    assert [line for line in log.read_text().splitlines() if "Traceback" in line or " E " in line] == []


def test_traffic_has_every_kind_of_request() -> None:
    traffic = Traffic(0, "tiny", context_words=1000)
    asks = [traffic.ask(i) for i in range(REQUESTS)]
    assert asks == [traffic.ask(i) for i in range(REQUESTS)]
    cancels = Counter(a.cancel for a in asks)
    bad = [a for a in asks if a.status != 200]
    assert set(cancels) == {None, *CANCELS}
    assert 0.25 < 1 - cancels[None] / REQUESTS < 0.35
    assert 0.1 < len(bad) / REQUESTS < 0.2 and len({a.kind for a in bad}) > 15
    assert all(a.cancel is None for a in bad)
    assert {a.kind for a in asks if a.status == 200} == {
        "greedy", "long", "sampled", "samples", "structured", "stop", "logprobs", "penalties",
    }  # fmt: skip
    assert {a.form for a in asks} == {"", "object", "schema", "regex", "choice"}
    assert len({a.key for a in asks if a.key}) < 0.9 * sum(bool(a.key) for a in asks)


def ask(index: int, *, samples: int = 1, form: str = "", key: str = "k") -> Ask:
    return Ask(index, "x", "POST", TEXT, JSON_TYPE, b"{}", samples=samples, max_tokens=4, key=key, form=form)


def test_wrong_answers_are_noticed() -> None:
    tally = Tally()
    tally.judge(ask(1), ["a"], ["stop"], 1)
    tally.judge(ask(2), ["a"], ["length"], 4)
    tally.judge(ask(3, key="other"), ["b"], ["stop"], 2)
    assert tally.problems == [] and tally.repeats == 1
    tally.judge(ask(4), ["b"], ["stop"], 1)
    assert tally.n_problems == 1 and "the same request 1 was answered ['a']" in tally.problems[0]
    tally.judge(ask(5, key="more"), ["a"], ["stop"], 5)
    assert tally.n_problems == 2 and "usage has 5 tokens, at most 4" in tally.problems[1]
    assert what_is_wrong(ask(6, samples=2), ["a"], ["stop"]) is not None
    assert what_is_wrong(ask(6), ["a"], [None]) is not None
    assert what_is_wrong(ask(6, form="choice"), ["perhaps"], ["stop"]) is not None
    assert what_is_wrong(ask(6, form="choice"), ["maybe"], ["stop"]) is None
    assert what_is_wrong(ask(6, form="regex"), ["0"], ["stop"]) is not None
    assert what_is_wrong(ask(6, form="object"), ["[]"], ["stop"]) is not None


def test_session_that_stays_is_noticed(server: Server) -> None:
    before = server.holdings()
    body = {"model": "tiny", "prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 8}
    with (
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http,
        http.stream("POST", TEXT, json=body) as r,
    ):
        chunks = r.iter_raw()  # dropping it would close the stream
        next(chunks)
        found = leaks(server, before, timeout_s=0.1)
    assert any("not idle" in f for f in found) and any("gateway_fds" in f for f in found), found
