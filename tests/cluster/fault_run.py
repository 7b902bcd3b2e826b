"""Harm to workers of a running server, one moment after another, while requests are under way; what has become of these requests."""

import json
import random
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.cluster.served import Served

MOMENTS = ("submitted", "mid_prompt", "first_token", "told", "offered", "reading", "adopted", "decoding")
HANDED_OVER = ("told", "offered", "reading", "adopted")
"""Moments of requests that another worker goes on with."""
FAKE = {"n_pages": 256, "max_model_len": 256, "max_num_seqs": 32, "step_s": 0.002}
TIERED = {"n_pages": 96, "token_s": 1.0}
"""A pool so small that pages leave it, and tokens that cost so much that they are worth a read."""
WORKERS = {"prefill": 2, "decode": 2}
N_OUT = 20
READY_S, ANSWER_S, CLEAN_S = 90.0, 90.0, 30.0


@dataclass
class Outcome:
    """What came of the trials of one kind of harm at one moment. ``hits``: those in which it happened; ``retries``: sessions that went on
    elsewhere because of it."""

    how: str
    moment: str
    trials: int = 0
    hits: int = 0
    requests: int = 0
    wrong: int = 0
    failed: int = 0
    leaks: int = 0
    retries: int = 0
    worst_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not (self.wrong or self.failed or self.leaks)

    def note(self, words: str) -> None:
        if len(self.notes) < 5:
            self.notes.append(words)


def start(
    folder: Path, model_path: Path, *, real: bool, fake: dict[str, Any] | None = None, **options: Any
) -> Served:
    """A server whose workers can come to harm. ``real``: engines around a tiny model."""
    (folder / "marks").mkdir(parents=True)
    engine = {"folder": str(folder / "marks"), "engine": None if real else {**FAKE, **(fake or {})}}
    base = {
        "workers": 0,
        **WORKERS,
        "backoff_s": 0.01,
        "failure_window_s": 1.0,
        "max_failures": 10_000,
        "worker_timeout_s": 2.0,
        "status_interval_s": 0.1,
    }
    return Served(folder, model_path, script="fault_worker.py", engine=engine, **{**base, **options})


def plain(folder: Path, model_path: Path, *, real: bool) -> Served:
    """A server with one such worker, which says what all others must say."""
    return start(folder, model_path, real=real, workers=1, prefill=0, decode=0, worker_timeout_s=30.0)


class Trials:
    """Asks ``server`` while harm comes to its workers, and ``oracle`` for what the answers must be."""

    def __init__(self, server: Served, oracle: Served, *, vocab: int, seed: int) -> None:
        self._server = server
        self._oracle = oracle
        self._vocab = vocab
        self._random = random.Random(seed)
        self._marks = server.folder / "marks"
        self._n = 0
        self._http = httpx.Client(timeout=ANSWER_S, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def run(self, how: str, moment: str, n: int, *, beside: int = 3) -> Outcome:
        """``n`` trials, each with one request that is marked and ``beside`` others."""
        out = Outcome(how, moment)
        before = self._server.metric("kilat_session_retries_total")
        with ThreadPoolExecutor(beside + 1) as pool:
            for _ in range(n):
                self._one(out, pool, beside)
        out.retries = int(self._server.metric("kilat_session_retries_total") - before)
        for words in self._left():
            out.leaks += 1
            out.note(words)
        return out

    def _one(self, out: Outcome, pool: ThreadPoolExecutor, beside: int) -> None:
        self.wait_ready()
        self._n += 1
        bodies = [self._body() for _ in range(beside + 1)]
        wanted = [f.result() for f in [pool.submit(self._ask, self._oracle, b) for b in bodies]]
        mark = {
            "id": self._n,
            "how": out.how,
            "moment": out.moment,
            "prompt": bodies[0]["prompt"],
            "n_out": self._random.randrange(3, N_OUT - 3),
            "later_s": self._random.random() * 0.01 if out.moment == "offered" else 0.0,
        }
        (self._marks / "new").write_text(json.dumps(mark))
        (self._marks / "new").rename(self._marks / "mark")
        began_s = time.monotonic()
        asked = [pool.submit(self._ask, self._server, bodies[0])]
        if out.moment in HANDED_OVER:
            # a decode worker that is idle while prompts queue computes its own: nobody else is there when the marked one is given away
            _until(lambda: asked[0].done() or self._n_open() > 0, ANSWER_S, "the marked one is placed", 0.005)
        asked += [pool.submit(self._ask, self._server, b) for b in bodies[1:]]
        got = [f.result() for f in asked]
        out.worst_s = max(out.worst_s, time.monotonic() - began_s)
        out.trials += 1
        out.requests += len(bodies)
        out.hits += (self._marks / f"done-{self._n}").exists()
        (self._marks / "mark").unlink(missing_ok=True)
        for body, want, answer in zip(bodies, wanted, got):
            if isinstance(answer, str):
                out.failed += 1
                out.note(f"trial {self._n}: {answer}")
            elif answer != want:
                out.wrong += 1
                out.note(f"trial {self._n}: {answer!r} instead of {want!r} (n {body['n']})")

    def _body(self) -> dict[str, Any]:
        r = self._random
        greedy = r.random() < 0.5
        return {
            "prompt": [r.randrange(self._vocab) for _ in range(r.randrange(135, 170))],
            "max_tokens": N_OUT,
            "n": r.choice((1, 1, 1, 3)),
            "seed": r.randrange(1 << 30),
            "temperature": 0.0 if greedy else 1.0,
            "ignore_eos": True,
            "stream": True,
        }

    def _ask(self, server: Served, body: dict[str, Any]) -> list[str] | str:
        """The text of each sample, or what went wrong."""
        try:
            answer = self._http.post(f"{server.url}/v1/completions", json=body)
        except httpx.HTTPError as e:
            return f"{type(e).__name__}: {e}"
        if answer.status_code != 200:
            return f"status {answer.status_code}: {answer.text[:300]}"
        texts, ends = [""] * body["n"], [0] * body["n"]
        for line in re.findall(r"^data: (\{.*\})$", answer.text, re.MULTILINE):
            event = json.loads(line)
            if "error" in event:
                return f"error in the stream: {event['error']}"
            for c in event["choices"]:
                texts[c["index"]] += c["text"]
                ends[c["index"]] += c["finish_reason"] == "length"
        return texts if set(ends) == {1} and "[DONE]" in answer.text else f"the stream ended {ends} times"

    def _n_open(self) -> float:
        return self._server.metric("kilat_sessions_open")

    def wait_ready(self) -> None:
        """Until two workers of each kind (or all, where there are fewer) can take sessions."""

        def ready() -> bool:
            names = [n for n, w in self._server.workers().items() if w["state"] == "ready"]
            return all(sum(n.startswith(kind) for n in names) >= min(n, 2) for kind, n in WORKERS.items())

        _until(ready, READY_S, "workers of both kinds are ready")

    def _left(self) -> Sequence[str]:
        """What is still held though no request is open."""
        held: list[str] = []

        def nothing() -> bool:
            held.clear()
            workers = self._server.workers()
            if len(workers) < sum(WORKERS.values()) or any(w["state"] != "ready" for w in workers.values()):
                held.append("not all workers are ready")
            for name in ("kilat_sessions_open", "kilat_moves_open"):
                if self._server.metric(name):
                    held.append(f"{name} is {self._server.metric(name):g}")
            for name, w in workers.items():
                for gauge in GAUGES:
                    if w["gauges"][gauge]:
                        held.append(f"{gauge} of {name} is {w['gauges'][gauge]:g}")
            return not held

        deadline_s = time.monotonic() + CLEAN_S
        while not nothing() and time.monotonic() < deadline_s:
            time.sleep(0.1)
        return held


GAUGES = (
    "sessions_running",
    "sessions_waiting",
    "pages_used",
    "pages_pinned",
    "pages_offered",
    "pages_moving",
    "pages_quarantined",
)


def _until(condition: Any, timeout_s: float, what: str, look_s: float = 0.05) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        time.sleep(look_s)
