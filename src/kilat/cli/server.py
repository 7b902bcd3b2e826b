"""The server that a command talks to: one that is given by URL, or one that it starts in a child process for
its own time.
"""

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from kilat.base import env
from kilat.base.errors import ConfigError, PeerError
from kilat.cli.client import Client
from kilat.cli.fetch import fetch
from kilat.cli.kernels import prepare
from kilat.cli.options import engine_argv
from kilat.cli.progress import spinner

START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 15.0
LOG_BYTES = 1 << 20
# what `kilat serve` says last when it cannot go on
_REASON = re.compile(r"^kilat serve: (.+)$|^.* E serve kilat\.serve giving up: (.+)$")
_READY = re.compile(r"^ready: .* at (http://\S+)/v1", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send requests. ``model`` is the name that the server knows, ``source`` what the person asked
    for.
    """

    url: str
    model: str
    source: str
    api_key: str | None = None
    child: "ChildServer | None" = None

    def require_process(self) -> None:
        """Raise PeerError when the server was started by this command and has ended."""
        if self.child is not None:
            self.child.require_running()


def model_of(args: argparse.Namespace) -> str | None:
    """The model that was named, as MODEL or with ``--model``. Raises ConfigError for two."""
    named = [m for m in (getattr(args, "model_argument", None), args.model) if m is not None]
    if len(named) == 2:
        raise ConfigError(f"got MODEL {named[0]} and --model {named[1]}: name one")
    return named[0] if named else None


def check_target(args: argparse.Namespace) -> None:
    """Raise ConfigError when neither a model nor ``--url`` is given, or options that do not go together."""
    if args.url is None and model_of(args) is None:
        raise ConfigError("got neither a model nor --url: name one of them")
    if args.url is None and args.api_key is not None:
        raise ConfigError("got --api-key without --url: a server that this command starts needs none")
    if args.url is not None:
        given = [flag for flag in engine_argv(args) if flag.startswith("--") and flag != "--seed"]
        if given:
            raise ConfigError(f"got {given[0]} with --url: it is an option of the server, give it there")


@contextmanager
def target(args: argparse.Namespace) -> Iterator[Target]:
    """The server of ``--url``, or a server for the named model that runs until the block ends.

    Raises ConfigError as :func:`check_target` does, PeerError when the server does not start or answer.
    """
    check_target(args)
    model = model_of(args)
    if args.url is not None:
        yield asyncio.run(_given(args.url, model, args.api_key))
        return
    assert model is not None
    # both here, where they can be seen
    files = fetch(model)
    prepare(args, lambda text: print(f"{args.parser.prog}: {text}", file=sys.stderr))
    command = [sys.executable, "-m", "kilat.cli", "serve", model, "--port", "0", "--drain-timeout", "0"]
    command += ["--stop-at-stdin-end", *engine_argv(args)]
    with spinner(f"starting {model}"):
        server = ChildServer(command)
        try:
            url = server.wait_ready(START_TIMEOUT_S)
        except BaseException:
            server.stop()
            raise
    try:
        yield Target(url, files.name, model, child=server)
    finally:
        server.stop()


async def _given(url: str, model: str | None, api_key: str | None) -> Target:
    async with Client(url, api_key=api_key) as client:
        names = await client.model_ids()
    if model is None and not names:
        raise ConfigError("the server of --url serves no model")
    if model is not None and model not in names:
        raise ConfigError(
            f"the server of --url serves no model {model!r}: it has {', '.join(names) or 'none'}"
        )
    name = model or names[0]
    return Target(url, name, name, api_key)


class ChildServer:
    """A server in a child process. It stops when this process ends, however that happens: its standard input
    is a pipe that closes then.

    ``command`` must print ``ready: ... at URL/v1`` when it serves. Its output goes to a file that is shown
    only when it fails.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=env.child_environment(KILAT_LOG="warning"),
            start_new_session=True,  # Ctrl-C in the terminal stops an answer, not the server
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, timeout_s: float) -> str:
        """The server's URL, once it serves. Raises PeerError with the end of its output when it exits or is
        late.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = _READY.search(self._output())
            if found:
                return found[1]
            self.require_running()
            time.sleep(0.02)
        raise PeerError(f"the server was not ready after {timeout_s:g} s: {self._last_words()}")

    def require_running(self) -> None:
        """Raise PeerError, with the end of the child's output, when it has exited."""
        status = self._process.poll()
        if status is not None:
            raise PeerError(f"the server exited with status {status}: {self._last_words()}")

    def stop(self) -> None:
        """Ask the child to stop, then make it. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._log.close()

    def _output(self) -> str:
        # not with seek: the child writes at the offset that the two share
        return os.pread(self._log.fileno(), LOG_BYTES, 0).decode("utf-8", "replace")

    def _last_words(self) -> str:
        lines = self._output().strip().splitlines()
        if lines and (found := _REASON.match(lines[-1])):
            return found[1] or found[2]
        return " | ".join(lines[-3:]) or "it said nothing"
