"""A server that a command starts: found by the line it prints, and gone when the command is gone."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kilat.base.errors import PeerError
from kilat.cli import server
from kilat.cli.main import build_parser
from kilat.cli.server import ChildServer

pytestmark = pytest.mark.cluster

READY = "print('ready: kilat at http://127.0.0.1:4711/v1 (0.1 s)', flush=True)\n"
UNTIL_STDIN_ENDS = "import sys\nsys.stdin.read()\n"


def child(code: str) -> ChildServer:
    return ChildServer([sys.executable, "-c", code])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


def test_url_is_read_from_the_line_that_says_ready() -> None:
    one = child("print('loading')\n" + READY + UNTIL_STDIN_ENDS)
    try:
        assert one.wait_ready(30) == "http://127.0.0.1:4711"
        one.require_running()
    finally:
        one.stop()
    wait_gone(one.pid)


def test_child_that_fails_is_an_error_with_its_last_words() -> None:
    one = child("import sys\nprint('a'); sys.exit('model x has no tensor y')")
    with pytest.raises(PeerError, match=r"exited with status 1: .*model x has no tensor y"):
        one.wait_ready(30)
    one.stop()


@pytest.mark.parametrize(
    "last",
    [
        "kilat serve: x is 1, allowed 2",
        "2026-01-02 03:04:05,678 E serve kilat.serve giving up: x is 1, allowed 2",
    ],
)
def test_reason_that_a_server_gives_up_for_is_told_alone(last: str) -> None:
    one = child(f"import sys\nprint('W worker noise'); sys.exit({last!r})")
    with pytest.raises(PeerError) as error:
        one.wait_ready(30)
    assert error.value.message == "the server exited with status 1: x is 1, allowed 2"
    one.stop()


def test_child_that_is_late_is_an_error_and_stop_ends_it() -> None:
    one = child("print('still loading', flush=True)\n" + UNTIL_STDIN_ENDS)
    with pytest.raises(PeerError, match=r"not ready after 0\.3 s"):
        one.wait_ready(0.3)
    one.stop()
    one.stop()
    wait_gone(one.pid)


def test_child_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STOP_TIMEOUT_S", 0.3)
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "time.sleep(60)"
    one = child(code)
    one.wait_ready(30)
    one.stop()
    wait_gone(one.pid)


class FakeChild:
    """Stands for a child that serves at once."""

    commands: list[list[str]] = []

    def __init__(self, command: list[str]) -> None:
        self.commands.append(command)

    def wait_ready(self, timeout_s: float) -> str:
        return "http://127.0.0.1:4711"

    def stop(self) -> None:
        self.commands.append(["stop"])


def test_own_server_gets_a_free_port_the_engine_options_and_the_models_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ChildServer", FakeChild)
    monkeypatch.setattr(FakeChild, "commands", [])
    (tmp_path / "config.json").write_text("{}")
    args = build_parser().parse_args(["chat", str(tmp_path), "--threads", "3"])
    with pytest.raises(ValueError, match="oops"), server.target(args) as target:
        assert (target.url, target.model, target.source) == (
            "http://127.0.0.1:4711",
            tmp_path.name,
            str(tmp_path),
        )
        raise ValueError("oops")
    [command, stop] = FakeChild.commands
    assert command[1:5] == ["-m", "kilat.cli", "serve", str(tmp_path)] and stop == ["stop"]
    child = build_parser().parse_args(command[3:])
    assert (child.host, child.port, child.threads, child.stop_at_stdin_end) == ("127.0.0.1", 0, 3, True)


def test_child_ends_when_its_parent_is_killed() -> None:
    parent_code = (
        "import sys\nfrom kilat.cli.server import ChildServer\n"
        f"one = ChildServer([sys.executable, '-c', {READY + UNTIL_STDIN_ENDS!r}])\n"
        "one.wait_ready(30)\nprint(one.pid, flush=True)\nsys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.communicate(timeout=30)
    wait_gone(pid)
