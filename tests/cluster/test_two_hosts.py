"""Two hosts: network namespaces with a cable between them, a Ray node in each, prefill in one and decode in the other."""

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from ray_head import GONE_AFTER, RayHead
from served import Served, eventually

from tests.policy.sched.fakes import VOCAB, alone, record

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]

SCHED = {"n_pages": 256, "max_model_len": 256, "max_num_seqs": 32, "step_s": 0.002}
N_OUT = 24
CLIENT = """
import json, sys, urllib.request
url, body = sys.argv[1], sys.argv[2].encode()
ask = urllib.request.Request(url, body or None, {"content-type": "application/json"})
print(urllib.request.urlopen(ask, timeout=60).read().decode())
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@dataclass(frozen=True)
class Host:
    name: str
    address: str

    @property
    def inside(self) -> list[str]:
        """The start of a command that runs on this host."""
        return ["ip", "netns", "exec", self.name]


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts whose only way to each other is a cable, ``c`` at both ends."""
    n = os.getpid() % 200 + 20
    pair = Host(f"kilat-a{os.getpid()}", f"10.213.{n}.1"), Host(f"kilat-b{os.getpid()}", f"10.213.{n}.2")
    try:
        for host in pair:
            ip("netns", "add", host.name)
        ip(
            "link",
            "add",
            "c",
            "netns",
            pair[0].name,
            "type",
            "veth",
            "peer",
            "name",
            "c",
            "netns",
            pair[1].name,
        )
        for host in pair:
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "c")
            ip("-n", host.name, "link", "set", "lo", "up")
            ip("-n", host.name, "link", "set", "c", "up")
    except (OSError, subprocess.CalledProcessError) as e:
        remove(pair)
        pytest.skip(f"no network namespaces here: {e}")
    yield pair
    remove(pair)


def remove(pair: tuple[Host, Host]) -> None:
    for host in pair:
        subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True, timeout=20)


def call(host: Host, url: str, body: dict[str, Any] | None = None) -> Any:
    """What a client on this host gets."""
    command = [*host.inside, sys.executable, "-c", CLIENT, url, json.dumps(body) if body else ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    return json.loads(done.stdout)


def test_prompt_of_one_host_goes_on_at_the_other_and_without_it_when_the_cable_is_cut(
    hosts: tuple[Host, Host], start: Callable[..., Served]
) -> None:
    here, there = hosts
    head = RayHead(host=here.address, port=6379, cpus=1, inside=here.inside)
    other = None
    try:
        other = RayHead(head.address, host=there.address, cpus=1, inside=there.inside)
        server = start(
            workers=0,
            prefill=1,
            decode=1,
            transports=("tcp",),
            ray={"address": head.address, "control_host": here.address},
            engine={"sched": SCHED},
            inside=here.inside,
            env={"RAY_AUTH_MODE": "disabled", **GONE_AFTER},
            worker_timeout_s=2.0,
            backoff_s=0.05,
        )
        started = dict(re.findall(r"worker_started pid=\d+ worker=(\w+-0)\S* .*host=(\S+)", server.log()))
        assert sorted(started.values()) == [here.address, there.address]

        def generate(seed: int) -> None:
            prompt = [random.Random(seed).randrange(VOCAB) for _ in range(150)]
            body = {"prompt": prompt, "seed": 7, "ignore_eos": True, "max_tokens": N_OUT}
            answer = call(here, f"{server.url}/v1/completions", body)
            one = record("s", prompt, seed=7, max_tokens=N_OUT)
            assert [ord(c) for c in answer["choices"][0]["text"]] == alone(one, 0, 256)[0]

        def totals() -> dict[str, float]:
            return call(here, f"{server.url}/cluster/workers")["totals"]

        generate(1)
        before = totals()
        assert before["hand_overs"] == 1 and before["moved_bytes"] > 0, before
        ip("-n", there.name, "link", "set", "c", "down")
        generate(2)
        eventually(lambda: "worker_died" in server.log(), "the other host is given up")
        before = totals()
        generate(3)
        assert totals()["hand_overs"] == before["hand_overs"], "nobody was there to hand over to"
    finally:
        for node in (other, head):
            if node is not None:
                node.stop()
