"""The commands with a real gateway, worker and engine around a tiny random model."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kilat.cli import serve
from kilat.cli.main import main
from tests.cli.test_child_server import wait_gone
from tests.cli.whole_model import write_model

pytestmark = pytest.mark.cluster

SMALL = ("--kernels", "reference", "--threads", "1", "--kv-cache-memory-bytes", "8MiB", "--max-num-seqs", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


def kilat(*argv: str, typed: str = "", timeout_s: float = 120) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kilat.cli", *argv]
    return subprocess.run(
        command, input=typed, capture_output=True, text=True, timeout=timeout_s, check=False
    )


@contextlib.contextmanager
def serving(model: Path, *more: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    command = [sys.executable, "-m", "kilat.cli", "serve", str(model), "--port", "0", *SMALL, *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"ready: \S+ at (http://\S+)/v1 .*\n", line)
        assert found, (line, process.stderr and process.stderr.read())
        yield found[1], process
    finally:
        process.kill()
        process.communicate(timeout=30)


def children(pid: int) -> list[int]:
    """Processes below ``pid``, at any depth."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1])
    found, todo = [], [pid]
    while todo:
        below = [p for p, parent in parents.items() if parent == todo[0]]
        found += below
        todo = todo[1:] + below
    return found


def test_serve_answers_under_its_name_and_key_and_exits_0_after_sigterm(model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nkl_me_12345678\n")
    with serving(model, "--served-model-name", "small", "--api-key-file", str(keys)) as (url, process):
        body = {"model": "small", "prompt": "x", "max_tokens": 4, "ignore_eos": True}
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
            assert http.post("/v1/completions", json=body).status_code == 401
            r = http.post("/v1/completions", json=body, headers={"Authorization": "Bearer kl_me_12345678"})
        assert r.status_code == 200 and r.json()["usage"]["completion_tokens"] == 4
        worker = children(process.pid)
        assert worker
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    for pid in worker:
        wait_gone(pid)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--host", "0.0.0.0"), "no API key is set"),
        (("--api-key", "short"), "8 or more"),
        (("--kernels", "cuda"), "kernels is 'cuda'"),
        (("--max-model-len", "100K"), "512 positions"),
        (("--kv-cache-memory-bytes", "4K"), "KV cache"),
    ],
)
def test_serve_refuses_what_it_cannot_do_in_one_line(argv: tuple[str, ...], says: str, model: Path) -> None:
    done = kilat("serve", str(model), "--port", "0", *argv)
    assert done.returncode != 0 and says in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--max-model-len", "100K"), "--max-model-len is 102,400, the model was trained for 512 positions"),
        (("--device", "cpu", "--host-cache-gb", "1"), "in the host's memory already"),
        (
            ("--disk-cache-gb", "1", "--disk-cache-dir", "/proc/pages"),
            "the folder /proc/pages cannot be written",
        ),
        (
            ("--disk-cache-gb", "1000000", "--disk-cache-dir", "{tmp}"),
            "--disk-cache-gb is 1e+06, the disk of {tmp} has",
        ),
    ],
)
def test_what_this_machine_or_model_has_not_is_one_line_and_exit_2(
    argv: tuple[str, ...], says: str, model: Path, tmp_path: Path
) -> None:
    argv = tuple(a.format(tmp=tmp_path) for a in argv)
    done = kilat("serve", str(model), "--port", "0", "--kernels", "reference", *argv)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert says.format(tmp=tmp_path) in done.stderr


def test_disk_cache_may_be_as_large_as_what_it_holds_and_what_is_free(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker-0").mkdir()
    (tmp_path / "worker-0" / "pages").write_bytes(b"x" * 8_000_000)
    usage = type("Usage", (), {"free": 4_000_000})
    monkeypatch.setattr(serve.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(serve.log, "setup", lambda process: None)
    monkeypatch.setattr(serve, "serve", lambda config: 0)
    line = [
        "serve",
        str(model),
        "--kernels",
        "reference",
        "--disk-cache-dir",
        str(tmp_path),
        "--disk-cache-gb",
    ]
    assert main([*line, "0.0115"]) == 0
    assert main([*line, "0.0125"]) == 2


def test_wrong_option_costs_no_download(tmp_path: Path) -> None:
    done = kilat("serve", "no-such-model", "--host", "0.0.0.0")
    assert done.returncode == 2 and "no API key is set" in done.stderr and done.stderr.count("\n") == 1


def test_taken_port_is_one_line_and_exit_2(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = kilat("serve", str(model), "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2 and "choose another --port" in done.stderr and done.stderr.count("\n") == 1


def test_address_of_another_machine_is_one_line_and_exit_2(model: Path) -> None:
    done = kilat("serve", str(model), "--host", "192.0.2.1", "--api-key", "k" * 32, "--port", "0")
    assert done.returncode == 2 and "choose another --host" in done.stderr and done.stderr.count("\n") == 1


def test_chat_starts_a_server_of_its_own_and_leaves_nothing_behind(model: Path) -> None:
    command = [sys.executable, "-m", "kilat.cli", "chat", str(model), "--max-tokens", "8", *SMALL]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stderr is not None
    process.stdin.write("hello\n")
    process.stdin.flush()
    notes = ""
    while "first after" not in notes:
        line = process.stderr.readline()
        assert line, notes
        notes += line
    below = children(process.pid)
    assert len(below) >= 2, "a gateway and its worker"
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    for pid in below:
        wait_gone(pid)


def test_server_that_cannot_start_is_an_error_with_the_reason(model: Path) -> None:
    done = kilat("chat", str(model), "--kernels", "reference", "--max-model-len", "100K", typed="x\n")
    assert done.returncode == 1
    assert "512 positions" in done.stderr and "Traceback" not in done.stderr


def test_killed_run_takes_its_server_along_and_the_next_one_finishes(model: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"custom_id": f"r{i}", "prompt": f"p{i}", "max_tokens": 12, "ignore_eos": True} for i in range(24)
    ]
    source.write_text("".join(json.dumps(r) + "\n" for r in rows))
    argv = ["run", str(source), str(out), "--model", str(model), "--concurrency", "2", *SMALL]
    first = subprocess.Popen([sys.executable, "-m", "kilat.cli", *argv], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while not (out.exists() and out.read_bytes().count(b"\n") >= 3):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.01)
    below = children(first.pid)
    os.kill(first.pid, signal.SIGKILL)
    first.wait(30)
    for pid in below:
        wait_gone(pid)
    before = out.read_bytes()
    done = kilat(*argv)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes().startswith(before[: before.rfind(b"\n") + 1]), (
        "finished rows are not computed again"
    )
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(r["custom_id"] for r in found) == sorted(r["custom_id"] for r in rows)
    bodies = [r["response"]["body"] for r in found]
    assert all(b["usage"]["completion_tokens"] == 12 and b["model"] == model.name for b in bodies)


def test_throughput_is_measured_in_this_process(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    argv = "bench throughput --requests 6 --input-len 4 --output-len 5 --repeat 2".split()
    done = kilat(*argv, str(model), "--json", str(file), *SMALL)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert [r["requests"] for r in result["rounds"]] == [6, 6]
    assert result["shapes"]["output_tokens"] == 5.0
    assert (result["threads"], result["dtype"], result["device"]) == (1, "float32", "cpu")
    assert result["spread"]["output_tps"]["n"] == 2 and "output tok/s" in done.stdout


def test_utilisation_is_printed_and_written_with_its_gaps_named(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    argv = "bench throughput --requests 6 --input-len 4 --output-len 40 --repeat 1 --utilisation".split()
    done = kilat(*argv, str(model), "--json", str(file), *SMALL)
    assert done.returncode == 0, done.stderr
    use = json.loads(file.read_text())["utilisation"]
    assert (use["device"], use["busy"], use["rows"]) == ("cpu", "forward calls", 6.0)
    assert 0 < use["busy_share"] <= 1
    assert use["busy_share"] + sum(g["share"] for g in use["gaps"]) == pytest.approx(1.0, abs=1e-3)
    assert use["bandwidth_share"] > 0 and use["roofs"]["product"] == "float32 1024^3"
    for said in ("utilisation of cpu", "bandwidth", "arithmetic", "host: schedule"):
        assert said in done.stdout


def test_serving_is_measured_on_a_server_of_its_own(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    argv = "bench serve --clients 2 --requests 4 --input-len 4 --output-len 5 --slo e2e=60000".split()
    done = kilat(*argv, str(model), "--json", str(file), *SMALL)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    [one] = result["rounds"]
    assert (one["requests"], one["errors"]) == (4, 0) and one["goodput_rps"] > 0
    assert (result["threads"], result["dtype"], result["device"]) == (1, "float32", "cpu")
    assert "reference" in result["kernels"]
