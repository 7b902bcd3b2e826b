"""`kilat chat`: scripted input, and a real terminal (pty) with Ctrl-C and Ctrl-D."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kilat.cli.chat import speed
from kilat.cli.client import Chunk, Usage
from tests.cli.fake_server import Breaks, Fail, FakeServer, Hold, running

pytestmark = pytest.mark.cluster


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(FakeServer()) as fake:
        yield fake


def command(server: FakeServer, *more: str) -> list[str]:
    return [sys.executable, "-m", "kilat.cli", "chat", "--url", server.url, *more]


def chat(server: FakeServer, typed: str, *more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(server, *more), input=typed, capture_output=True, text=True, timeout=60, check=False
    )


def contents(body: dict[str, Any]) -> list[str]:
    return [m["content"] for m in body["messages"]]


def test_piped_chat_prints_answers_and_keeps_the_conversation(server: FakeServer) -> None:
    done = chat(server, "one\n\ntwo\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "You said one.\nYou said two.\n"
    assert contents(server.bodies[1]) == ["one", "You said one.", "two"]
    assert server.bodies[0]["model"] == "fake"


def test_speed_of_each_answer_is_a_note_beside_it(server: FakeServer) -> None:
    done = chat(server, "one\ntwo\n")
    assert (
        len(re.findall(r"^3 tokens, ([\d.]+ tokens/s, )?first after \d+ ms$", done.stderr, re.MULTILINE)) == 2
    )


def test_reset_forgets_and_system_stays(server: FakeServer) -> None:
    chat(server, "/system be brief\none\n/reset\ntwo\n/system\nthree\n")
    assert contents(server.bodies[0]) == ["be brief", "one"]
    assert contents(server.bodies[1]) == ["be brief", "two"]
    assert contents(server.bodies[2]) == ["two", "You said two.", "three"]
    assert server.bodies[0]["messages"][0]["role"] == "system"


def test_exit_leaves_and_unknown_commands_are_explained_not_sent(server: FakeServer) -> None:
    done = chat(server, "/rest\n/exit\nnever sent\n")
    assert done.returncode == 0 and server.bodies == []
    assert "/reset forgets" in done.stderr


def test_settings_go_into_every_request(server: FakeServer) -> None:
    chat(
        server,
        "x\n",
        "--temperature",
        "0",
        "--max-tokens",
        "9",
        "--seed",
        "4",
        "--system",
        "s",
        "--model",
        "fake",
    )
    body = server.bodies[0]
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (0.0, 9, 4)
    assert contents(body) == ["s", "x"]


def test_failed_answer_is_shown_and_not_remembered(server: FakeServer) -> None:
    server.script = lambda body, nth: Fail(400, "prompt has 9 tokens, limit 8") if nth == 0 else None
    done = chat(server, "one\ntwo\n")
    assert "error: prompt has 9 tokens, limit 8" in done.stderr
    assert done.stdout == "You said two.\n" and done.returncode == 0
    assert contents(server.bodies[1]) == ["two"]


def test_piped_chat_whose_last_answer_failed_exits_1(server: FakeServer) -> None:
    server.script = lambda body, nth: Breaks("the worker died")
    done = chat(server, "one\n")
    assert done.returncode == 1 and done.stdout == "You \n"
    assert "error: the worker died" in done.stderr and "Traceback" not in done.stderr


def test_nobody_listening_is_one_line_and_exit_1() -> None:
    gone = FakeServer()
    with running(gone):
        pass
    done = chat(gone, "x\n")
    assert done.returncode == 1 and done.stderr.startswith(
        f"kilat chat: the server at {gone.url} did not answer"
    )
    assert done.stderr.count("\n") == 1


class Terminal:
    """A process behind a pty, read as it writes."""

    def __init__(self, argv: list[str]) -> None:
        self._fd, child = pty.openpty()
        self.process = subprocess.Popen(
            argv,
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(child)
        self.seen = self.everything = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, pattern: str) -> None:
        """Read until ``pattern`` is in what came since the last match."""
        deadline = time.monotonic() + 30
        while not (found := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self._fd], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"no {pattern!r} in {self.seen!r}"
            new = os.read(self._fd, 65536).decode()
            self.seen += new
            self.everything += new
        self.seen = self.seen[found.end() :]

    def close(self) -> int:
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self._fd)


@contextmanager
def terminal(server: FakeServer) -> Iterator[Terminal]:
    term = Terminal(command(server))
    try:
        term.wait_for("> ")
        yield term
    finally:
        term.process.kill()


def test_terminal_shows_prompt_answer_and_dim_speed_and_ctrl_d_leaves(server: FakeServer) -> None:
    with terminal(server) as term:
        term.type("hello\n")
        term.wait_for(r"You said hello\.")
        term.wait_for(r"\x1b\[2m3 tokens, .*first after \d+ ms")
        term.wait_for("> ")
        term.type("\x04")
        assert term.close() == 0


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(server: FakeServer) -> None:
    hold = Hold(threading.Event())
    server.script = lambda body, nth: hold if nth == 0 else None
    with terminal(server) as term:
        term.type("one\n")
        term.wait_for("You ")
        os.kill(term.process.pid, signal.SIGINT)
        term.wait_for("stopped")
        assert server.hung_up.wait(10), "the server must hear that nobody listens any more"
        term.wait_for("> ")
        term.type("two\n")
        term.wait_for(r"You said two\.")
        assert contents(server.bodies[1]) == ["one", "You ", "two"]
        term.wait_for("> ")
        term.type("/exit\n")
        assert term.close() == 0
    hold.event.set()


def test_ctrl_c_at_the_prompt_does_not_leave(server: FakeServer) -> None:
    with terminal(server) as term:
        term.type("half a li")
        term.wait_for("half a li")
        os.kill(term.process.pid, signal.SIGINT)
        term.wait_for("Ctrl-D leaves")
        term.wait_for("> ")
        term.type("hello\n")
        term.wait_for(r"You said hello\.")
        term.wait_for("> ")
        term.type("\x04")
        assert term.close() == 0
    assert contents(server.bodies[0]) == ["hello"]


def test_answer_cannot_steer_the_terminal(server: FakeServer) -> None:
    with terminal(server) as term:
        # Ctrl-V makes the terminal take the escape character as text; the fake server echoes it
        term.type("a\x16\x1b]0;owned\x16\x07b\n")
        term.wait_for(r"You said ")
        term.wait_for(r"b\.")
        assert contents(server.bodies[0]) == ["a\x1b]0;owned\x07b"]
        term.wait_for("> ")
        assert "]0;owned" in term.everything and "\x1b]0;owned" not in term.everything
        term.type("\x04")
        assert term.close() == 0


def chunk(at_s: float, text: str = "x", usage: Usage | None = None) -> Chunk:
    return Chunk(at_s, text, "", None, usage)


def test_speed_counts_tokens_after_the_first_and_prefers_the_servers_count() -> None:
    chunks = [chunk(1.5), chunk(2.0), chunk(3.5)]
    assert speed(chunks, 1.0) == "3 tokens, 1.0 tokens/s, first after 500 ms"
    assert (
        speed([*chunks, chunk(4.0, "", Usage(5, 9, 0))], 1.0) == "9 tokens, 4.0 tokens/s, first after 500 ms"
    )
    assert speed([chunk(1.25)], 1.0) == "1 tokens, first after 250 ms"
    assert speed([], 1.0) == "empty answer"
