"""`kilat up FILE` and `kilat down FILE`: a `kilat serve` that runs on after the command, and its end."""

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil

from kilat.base.env import cache_dir
from kilat.base.errors import ConfigError, PeerError
from kilat.cli.deployment import read_deployment, serve_argv
from kilat.cli.main import build_parser

POLL_S = 0.05
KILL_S = 10.0
LAST_LINES = 5


class Running(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The process of a deployment. ``created_s`` tells it from a later process with the same id."""

    pid: int
    created_s: float


def run(args: argparse.Namespace) -> int:
    """Start or end the deployment of the file."""
    deployment = read_deployment(args.file)
    folder = cache_dir() / "deployments"
    state, log = folder / f"{deployment.name}.json", folder / f"{deployment.name}.log"
    if args.verb == "down":
        return _down(state, deployment.name, args.timeout)
    process = _process(state)
    if process is not None:
        raise ConfigError(f"{deployment.name} is up (process {process.pid}): end it first, with kilat down")
    argv = ["serve", *serve_argv(deployment, args.file.resolve().parent)]
    build_parser().parse_args(argv)  # a wrong one ends here, with its reason
    folder.mkdir(parents=True, exist_ok=True)
    return _up(argv, state, log, args.timeout)


def _up(argv: list[str], state: Path, log: Path, timeout_s: float) -> int:
    with open(log, "wb") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "kilat.cli", *argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    state.write_bytes(msgspec.json.encode(Running(child.pid, psutil.Process(child.pid).create_time())))
    print(f"log:   {log}", flush=True)
    deadline_s = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline_s:
            lines = log.read_text(errors="replace").splitlines()
            ready = [line for line in lines if line.startswith(("ready: ", "try: "))]
            if len(ready) == 2:
                print("\n".join(ready))
                return 0
            if child.poll() is not None:
                state.unlink(missing_ok=True)
                print("\n".join(lines[-LAST_LINES:]), file=sys.stderr)
                raise PeerError(f"kilat serve ended with status {child.returncode}")
            time.sleep(POLL_S)
        raise PeerError(
            f"it is not ready after {timeout_s:g} s, and goes on; see its log, or end it with kilat down"
        )
    except KeyboardInterrupt:
        child.terminate()
        raise


def _down(state: Path, name: str, timeout_s: float) -> int:
    process = _process(state)
    if process is None:
        state.unlink(missing_ok=True)
        print(f"{name} is not up")
        return 0
    process.send_signal(signal.SIGTERM)
    if not _gone(process, timeout_s):
        print(f"{name} has not ended within {timeout_s:g} s: killed", file=sys.stderr)
        process.kill()
        if not _gone(process, KILL_S):
            raise PeerError(f"process {process.pid} cannot be killed")
    state.unlink(missing_ok=True)
    print(f"{name} is down")
    return 0


def _process(state: Path) -> psutil.Process | None:
    """The process that runs for a deployment."""
    try:
        known = msgspec.json.decode(state.read_bytes(), type=Running)
        process = psutil.Process(known.pid)
        is_it = process.create_time() == known.created_s and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, msgspec.MsgspecError, psutil.Error):
        return None
    return process if is_it else None


def _gone(process: psutil.Process, timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except psutil.TimeoutExpired:
        return False
    return True
