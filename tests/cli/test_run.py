"""`kilat run`: every row once, through kills, lost answers and errors."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kilat.cli import run
from kilat.cli.main import main
from tests.cli.fake_server import Drop, Fail, FakeServer, Hold, running

pytestmark = pytest.mark.cluster


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(FakeServer()) as fake:
        yield fake


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "BACKOFF_FIRST_S", 0.001)
    monkeypatch.setattr(run, "BACKOFF_LAST_S", 0.01)


def write_rows(tmp_path: Path, n: int) -> tuple[Path, Path]:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"custom_id": f"r{i}", "prompt": f"p{i}"}) + "\n" for i in range(n)))
    return source, tmp_path / "out.jsonl"


def results(out: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    found = {r["custom_id"]: r for r in rows}
    assert len(found) == len(rows), "a row is in the output twice"
    return found


def text(row: dict[str, Any]) -> str:
    return str(row["response"]["body"]["choices"][0]["text"])


def kilat_run(server: FakeServer, source: Path, out: Path, *more: str) -> int:
    return main(["run", str(source), str(out), "--url", server.url, *more])


def test_every_row_gets_its_own_answer_in_the_batch_format(server: FakeServer, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    rows = [
        {"custom_id": "a", "url": "/v1/chat/completions", "body": {"model": "gpt-4o", "messages": messages}},
        {"prompt": "two", "max_tokens": 3},
    ]
    source.write_text("\n".join(json.dumps(r) for r in rows))
    assert kilat_run(server, source, tmp_path / "out.jsonl", "--model", "fake") == 0
    found = results(tmp_path / "out.jsonl")
    assert set(found) == {"a", "line-2"}
    assert found["a"]["response"]["body"]["choices"][0]["message"]["content"] == "You said hi."
    assert text(found["line-2"]) == "You said two."
    assert found["a"]["response"]["status_code"] == 200 and found["a"]["error"] is None
    assert {b["model"] for b in server.bodies} == {"fake"} and server.bodies[0].get("stream") is None


def test_without_model_a_row_keeps_the_model_it_names(server: FakeServer, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x", "model": "mine"}\n{"prompt": "y"}\n')
    assert kilat_run(server, source, tmp_path / "out.jsonl") == 0
    assert sorted(b["model"] for b in server.bodies) == ["fake", "mine"]


def test_rows_in_flight_are_never_more_than_asked_for(server: FakeServer, tmp_path: Path) -> None:
    source, out = write_rows(tmp_path, 20)
    lock, open_now, most = threading.Lock(), [0], [0]

    def script(body: dict[str, Any], nth: int) -> None:
        with lock:
            open_now[0] += 1
            most[0] = max(most[0], open_now[0])
        time.sleep(0.02)  # so that requests would pile up if they could
        with lock:
            open_now[0] -= 1

    server.script = script
    assert kilat_run(server, source, out, "--concurrency", "3") == 0
    assert most[0] <= 3 and len(results(out)) == 20


def test_errors_that_may_pass_are_tried_again(server: FakeServer, tmp_path: Path) -> None:
    source, out = write_rows(tmp_path, 1)
    failures = [Fail(429, headers={"retry-after": "0"}), Drop(), Fail(503), Fail(502)]
    server.script = lambda body, nth: failures[nth] if nth < len(failures) else None
    assert kilat_run(server, source, out) == 0
    assert text(results(out)["r0"]) == "You said p0." and len(server.bodies) == 5


def test_bad_row_is_recorded_and_the_others_are_answered(server: FakeServer, tmp_path: Path) -> None:
    source, out = write_rows(tmp_path, 5)
    server.script = lambda body, nth: (
        Fail(400, "too long", "limit_exceeded") if body["prompt"] == "p2" else None
    )
    assert kilat_run(server, source, out) == 1
    found = results(out)
    assert len(found) == 5 and found["r2"]["error"] == {"code": "limit_exceeded", "message": "too long"}
    assert found["r2"]["response"]["status_code"] == 400
    assert sum(b["prompt"] == "p2" for b in server.bodies) == 1, "it cannot pass, so it is not tried again"
    assert kilat_run(server, source, out) == 1, "a recorded error stays one"
    assert len(server.bodies) == 5


def test_row_that_kills_its_connection_every_time_is_recorded_when_the_server_lives(
    server: FakeServer, tmp_path: Path
) -> None:
    source, out = write_rows(tmp_path, 3)
    server.script = lambda body, nth: Drop() if body["prompt"] == "p1" else None
    assert kilat_run(server, source, out, "--retries", "2") == 1
    found = results(out)
    assert found["r1"]["error"]["code"] == "unreachable" and found["r1"]["response"] is None
    assert sum(b["prompt"] == "p1" for b in server.bodies) == 3 and len(found) == 3


def test_lost_server_stops_the_run_and_blames_no_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_rows(tmp_path, 6)
    with running(FakeServer()) as first:

        def script(body: dict[str, Any], nth: int) -> object:
            if nth < 2:
                return None
            first.deaf = True
            return Drop()

        first.script = script  # type: ignore[assignment]
        assert kilat_run(first, source, out, "--concurrency", "1", "--retries", "1") == 1
    assert "server is lost" in capsys.readouterr().err
    assert [r["error"] for r in results(out).values()] == [None, None]
    with running(FakeServer()) as second:
        assert kilat_run(second, source, out) == 0
        assert len(second.bodies) == 4
    assert len(results(out)) == 6


def test_finished_run_asks_the_server_for_nothing(server: FakeServer, tmp_path: Path) -> None:
    source, out = write_rows(tmp_path, 2)
    assert kilat_run(server, source, out) == 0
    assert kilat_run(server, source, out) == 0
    assert len(server.bodies) == 2


def test_changed_input_is_refused_and_out_stays_as_it_is(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_rows(tmp_path, 2)
    assert kilat_run(server, source, out) == 0
    before = out.read_bytes()
    source.write_text(source.read_text() + '{"prompt": "new"}\n')
    assert kilat_run(server, source, out) == 2
    assert "the input has changed" in capsys.readouterr().err and out.read_bytes() == before


def test_in_and_out_must_be_two_files(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _ = write_rows(tmp_path, 1)
    assert kilat_run(server, source, source) == 2
    assert "same file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ((), "neither a model nor --url"),
        (("--model", "m", "--api-key", "k"), "--api-key without --url"),
        (("--url", "http://127.0.0.1:9", "--threads", "2"), "got --threads with --url"),
    ],
)
def test_options_that_do_not_go_together_touch_no_file(
    more: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_rows(tmp_path, 1)
    assert main(["run", str(source), str(out), *more]) == 2
    assert says in capsys.readouterr().err and not out.exists()


def test_unknown_model_of_a_server_is_an_error_that_lists_what_it_has(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_rows(tmp_path, 1)
    assert kilat_run(server, source, out, "--model", "other") == 2
    assert "serves no model 'other': it has fake" in capsys.readouterr().err


def start(server: FakeServer, source: Path, out: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "kilat.cli", "run", str(source), str(out), "--url", server.url]
    return subprocess.Popen([*command, "--concurrency", "4"], stderr=subprocess.PIPE)


def wait_for_rows(out: Path, n: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if out.exists() and out.read_bytes().count(b"\n") >= n:
            return
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.005)
    raise AssertionError(f"no {n} rows after 60 s")


def kill(process: "subprocess.Popen[bytes]", number: int = signal.SIGKILL) -> bytes:
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=60)
    return err


def test_killed_twice_each_row_is_in_the_output_exactly_once(server: FakeServer, tmp_path: Path) -> None:
    source, out = write_rows(tmp_path, 40)
    hold = Hold(threading.Event())
    for n_answered in (7, 26):
        # rows in flight beyond these wait, so that the kill comes in the middle of the work
        server.script = lambda body, nth, n=n_answered: hold if int(body["prompt"][1:]) >= n else None  # type: ignore[misc]
        process = start(server, source, out)
        wait_for_rows(out, n_answered, process)
        kill(process)
    hold.event.set()
    torn = out.read_bytes()
    out.write_bytes(torn[:-9])  # and the last row was torn by it
    server.script = lambda body, nth: None
    process = start(server, source, out)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and b"of an unfinished row" in err
    found = results(out)
    assert set(found) == {f"r{i}" for i in range(40)}
    assert all(text(found[f"r{i}"]) == f"You said p{i}." for i in range(40))
    assert len(server.bodies) <= 40 + 4 + 4 + 1, "only the rows in flight and the torn one are computed again"


def test_ctrl_c_says_how_far_it_came_and_exits_130(server: FakeServer, tmp_path: Path) -> None:
    source, out = write_rows(tmp_path, 10)
    hold = Hold(threading.Event())
    server.script = lambda body, nth: hold if nth >= 3 else None
    process = start(server, source, out)
    wait_for_rows(out, 3, process)
    err = kill(process, signal.SIGINT)
    hold.event.set()
    assert process.returncode == 130
    assert b"stopped with 3 of 10 rows; run it again to go on" in err and b"Traceback" not in err
