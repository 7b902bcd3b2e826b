"""kilat top, drain and cache explain: what they ask a server and what they show."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kilat.cli.cache import explanation
from kilat.cli.main import main
from kilat.cli.top import row

pytestmark = pytest.mark.cluster


def worker(**fields: Any) -> dict[str, Any]:
    counters = {
        "prompt_tokens": 100.0,
        "output_tokens": 50.0,
        "prefix_queried_tokens": 80.0,
        "prefix_hit_tokens": 20.0,
    }
    gauges = {"sessions_running": 2.0, "sessions_waiting": 1.0, "pages_used": 5.0, "pages_cached": 7.0}
    card = {
        "name": "decode-0",
        "id": "decode-0.abc",
        "state": "ready",
        "prefill_weight": 0.0,
        "decode_weight": 1.0,
        "n_pages": 64,
        "step_ms": 3.25,
        "counters": counters,
        "gauges": gauges,
    }
    return card | fields


TOTALS = {
    "open_requests": 3,
    "moves_open": 1,
    "hand_overs": 4,
    "planned_moves": 2,
    "prefix_lends": 6,
    "moves_done": 9,
    "moves_failed": 0,
    "moved_bytes": 2048,
    "session_retries": 5,
}


@contextmanager
def answering(status: int, body: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, str, Any]]]]:
    """A server that always says the same, and what it was asked."""
    asked: list[tuple[str, str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(("GET", self.path, self.headers.get("authorization")))
            self._answer()

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            asked.append(("POST", self.path, json.loads(data)))
            self._answer()

        def _answer(self) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def test_top_shows_each_worker_once_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    body = {
        "model": "tiny",
        "workers": [worker(), worker(name="prefill-0", state="draining")],
        "totals": TOTALS,
    }
    with answering(200, body) as (url, asked):
        assert main(["top", "--url", url, "--api-key", "k-12345678"]) == 0
    out = capsys.readouterr().out
    assert asked == [("GET", "/cluster/workers", "Bearer k-12345678")]
    assert "tiny: 3 requests open" in out and "hand-overs 4" in out and "2.0 KiB" in out
    lines = [line.split() for line in out.splitlines() if "-0 " in line]
    assert [line[:2] for line in lines] == [["decode-0", "ready"], ["prefill-0", "draining"]]
    assert "5/64" in lines[0] and "25" in lines[0]


def test_rates_are_of_the_time_between_two_looks_at_the_same_process() -> None:
    later = worker(counters={**worker()["counters"], "prompt_tokens": 300.0, "output_tokens": 60.0})
    assert row(worker(), later, 2.0)[-3:] == ["100", "5", "3.2"]
    assert row(None, later, 2.0)[-3:-1] == ["-", "-"]


def test_worker_that_has_said_nothing_yet_has_a_row_too() -> None:
    nothing = dict.fromkeys(worker()["counters"], 0.0)
    cells = row(None, worker(state="starting", n_pages=None, step_ms=0.0, counters=nothing), 1.0)
    assert cells[1] == "starting" and cells[5] == cells[7] == cells[-1] == "-"


@pytest.mark.parametrize(("flags", "restart"), [([], False), (["--restart"], True)])
def test_drain_names_the_worker_and_says_what_moved(
    flags: list[str], restart: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(200, {"worker": "worker-1", "moved_sessions": 7, "restarted": restart}) as (url, asked):
        assert main(["drain", "worker-1", *flags, "--url", url]) == 0
    assert asked == [("POST", "/cluster/workers/worker-1/drain", {"restart": restart})]
    out = capsys.readouterr().out
    assert "worker-1: 7 sessions moved" in out and ("a new one" in out) == restart


def test_drain_that_is_refused_is_one_line_and_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    body = {"error": {"message": "no other worker could take its sessions", "code": "overloaded"}}
    with answering(503, body) as (url, _):
        assert main(["drain", "worker-0", "--url", url]) == 1
    assert capsys.readouterr().err == "kilat drain: no other worker could take its sessions\n"


EXPLAINED = {
    "id": "cmpl-1",
    "prompts": [
        {
            "prompt_tokens": 40,
            "cached_tokens": 16,
            "recalled": [{"worker": "prefill-0", "pages": {"host": 1, "disk": 2}, "bytes": 999}],
            "routes": [
                {
                    "worker": "prefill-0",
                    "decode": "decode-0",
                    "lend_from": "decode-1",
                    "lent_pages": 1,
                    "why": {
                        "reason": "prefix lent by a peer",
                        "pages_held": {"decode-1": 1},
                        "miss": {"first_missing_page": 1, "because": "evicted by decode-1"},
                        "refused": {"decode-2": "draining"},
                    },
                },
                {"worker": "decode-0", "decode": None, "lend_from": None, "lent_pages": 0, "why": {}},
            ],
        },
        {"routes": []},
    ],
}


def test_explanation_says_where_it_went_what_was_found_and_what_was_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with answering(200, EXPLAINED) as (url, asked):
        assert main(["cache", "explain", "cmpl-1", "--url", url]) == 0
    assert asked[0][1] == "/v1/cache/explain/cmpl-1"
    out = capsys.readouterr().out
    assert out.splitlines() == list(explanation(EXPLAINED))
    for part in (
        "prompt 0: 40 tokens, 16 found in the prefix cache",
        "to prefill-0, handed over to decode-0: prefix lent by a peer",
        "1 pages from decode-1",
        "prefill-0 took 1 pages from its host cache and 2 pages from its disk cache",
        "page 1 was missing: evicted by decode-1",
        "not decode-2: draining",
        "again to decode-0",
        "prompt 1: not known any more",
    ):
        assert part in out
