"""`kilat bench latency | serve` against the fake server: what is sent, counted and written."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kilat
from kilat.cli.main import main
from tests.cli.fake_server import Fail, FakeServer, running

pytestmark = pytest.mark.cluster


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(FakeServer()) as fake:
        yield fake


def bench(server: FakeServer, tmp_path: Path, *argv: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "result.json"
    status = main(["bench", *argv, "--url", server.url, "--json", str(file)])
    return status, json.loads(file.read_text()) if file.exists() else {}


def test_closed_loop_sends_every_request_once_after_a_warm_up(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, result = bench(
        server, tmp_path, *"serve --clients 3 --requests 8 --input-len 20 --output-len 5".split()
    )
    assert status == 0
    measured = server.bodies[2:]
    assert len(measured) == 8 and len({b["prompt"] for b in measured}) == 8
    assert all(
        (b["max_tokens"], b["temperature"], b["ignore_eos"], b["stream"]) == (5, 0, True, True)
        for b in measured
    )
    [one] = result["rounds"]
    assert (one["requests"], one["errors"]) == (8, 0)
    assert one["output_tps"] == pytest.approx(8 * 3 / one["elapsed_s"], rel=1e-3)
    assert result["shapes"] == {"input_tokens": 7.0, "output_tokens": 3.0, "asked_output_tokens": 5.0}
    assert one["cached_tokens"] == 16
    out = capsys.readouterr().out
    assert "TTFT ms" in out and "TPOT ms" in out and "ITL ms" in out and "p99" in out


def test_result_says_where_and_with_what_it_was_measured(server: FakeServer, tmp_path: Path) -> None:
    _, result = bench(server, tmp_path, *"serve --clients 1 --requests 2 --seed 5".split())
    assert (result["bench"], result["kilat"], result["seed"], result["model"]) == (
        "serve",
        kilat.__version__,
        5,
        "fake",
    )
    assert {"sha", "cpu", "isa", "cores", "threads", "dtype", "device", "date", "load", "spread"} <= set(
        result
    )
    assert result["load"] == {"rate_rps": None, "clients": 1, "requests": 2, "slo_ms": {}}
    assert result["cores"] >= 1 and result["spread"]["output_tps"]["n"] == 1


def test_no_more_streams_than_clients_are_open(server: FakeServer, tmp_path: Path) -> None:
    lock, open_now, most = threading.Lock(), [0], [0]

    def script(body: dict[str, Any], nth: int) -> None:
        with lock:
            open_now[0] += 1
            most[0] = max(most[0], open_now[0])
        time.sleep(0.02)  # so that requests would pile up if they could
        with lock:
            open_now[0] -= 1

    server.script = script
    assert bench(server, tmp_path, *"serve --clients 4 --requests 16".split())[0] == 0
    assert most[0] <= 4


def test_open_loop_sends_at_the_seeded_arrivals(server: FakeServer, tmp_path: Path) -> None:
    times: list[float] = []
    server.script = lambda body, nth: times.append(time.perf_counter())
    argv = "serve --rate 50 --requests 20 --seed 3".split()
    status, result = bench(server, tmp_path, *argv)
    first = list(server.bodies[2:])
    assert status == 0 and len(first) == 20
    from kilat.cli.measures import poisson_arrivals

    due = poisson_arrivals(50, 20, 3)
    assert times[-1] - times[2] >= (due[-1] - due[0]) * 0.9, "requests may not come before they are due"
    assert result["rounds"][0]["late_ms"] >= 0.0
    server.bodies.clear()
    bench(server, tmp_path, *argv)
    assert {b["prompt"] for b in server.bodies[2:]} == {b["prompt"] for b in first}


def test_goodput_counts_only_what_met_the_limits(server: FakeServer, tmp_path: Path) -> None:
    argv = "serve --clients 2 --requests 4".split()
    _, strict = bench(server, tmp_path, *argv, "--slo", "ttft=0")
    _, loose = bench(server, tmp_path, *argv, "--slo", "ttft=60000,tpot=60000")
    assert strict["rounds"][0]["goodput_rps"] == 0.0
    assert loose["rounds"][0]["goodput_rps"] == loose["rounds"][0]["request_rps"] > 0


def test_failed_requests_are_counted_named_and_make_the_exit_status_1(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = lambda body, nth: Fail(503, "full") if nth == 4 else None
    status, result = bench(server, tmp_path, *"serve --clients 1 --requests 5".split())
    assert status == 1 and result["rounds"][0]["errors"] == 1
    assert "overloaded: full" in result["first_error"] or "full" in result["first_error"]
    assert "1 requests failed" in capsys.readouterr().out


def test_server_that_refuses_the_warm_up_is_one_line(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = lambda body, nth: Fail(400, "no ignore_eos here")
    status, result = bench(server, tmp_path, *"serve --clients 1 --requests 5".split())
    assert (status, result) == (1, {})
    assert "no ignore_eos here" in capsys.readouterr().err


def test_dataset_gives_prompts_and_lengths(server: FakeServer, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "alpha", "output_tokens": 4}\n{"prompt": "beta", "output_tokens": 6}\n')
    bench(
        server,
        tmp_path,
        "serve",
        "--clients",
        "1",
        "--requests",
        "2",
        "--repeat",
        "2",
        "--dataset",
        str(data),
    )
    sent = [(b["prompt"], b["max_tokens"]) for b in server.bodies[2:]]
    assert sent == [("alpha", 4), ("beta", 6), ("1 alpha", 4), ("1 beta", 6)]


def test_latency_measures_every_length_one_stream_at_a_time(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, result = bench(server, tmp_path, *"latency --input-len 4,9 --output-len 6 --repeat 3".split())
    assert status == 0
    assert [len(b["prompt"].split()) for b in server.bodies[2:]] == [4, 4, 4, 9, 9, 9]
    assert [r["input_words"] for r in result["results"]] == [4, 9]
    for r in result["results"]:
        assert r["input_tokens"] == 7 and r["ttft_ms"]["n"] == 3
        assert 0 < r["ttft_ms"]["min"] <= r["ttft_ms"]["median"] <= r["ttft_ms"]["max"]
    assert "prompt tokens" in capsys.readouterr().out
