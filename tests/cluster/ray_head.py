"""A Ray of one host for tests: started, killed all at once, started again at the same address."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

START_S = 90.0
GONE_AFTER = {"RAY_gcs_rpc_server_reconnect_timeout_s": "1"}
"""Seconds after which the processes of Ray end when the head does not answer; 60 if nobody says so."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class RayHead:
    """One node. ``address`` stays when it is killed and started again. ``stop()`` must be called.

    ``at``: the address of the head that it joins; without one it is a head. ``inside``: a command that runs it, for another network.
    """

    def __init__(
        self,
        at: str | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        cpus: int = 4,
        inside: Sequence[str] = (),
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray"))  # short: sockets lie in it
        self.address = at or f"{host}:{port or free_port()}"
        self._command = [
            *(
                *inside,
                sys.executable,
                "-m",
                "ray.scripts.scripts",
                "start",
                "--block",
                "--node-ip-address",
                host,
            ),
            *("--num-cpus", str(cpus), "--object-store-memory", str(80 << 20)),
        ]
        if at:
            self._command += ["--address", at]
        else:
            self._command += ["--head", "--port", self.address.split(":")[1], "--include-dashboard", "false"]
            self._command += ["--temp-dir", str(self.folder)]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        log = self.folder / "start.log"
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                self._command,
                env={
                    **os.environ,
                    "RAY_AUTH_MODE": "disabled",
                    "RAY_USAGE_STATS_ENABLED": "0",
                    **GONE_AFTER,
                },
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while b"Ray runtime started" not in log.read_bytes():
            assert self._process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    @property
    def root(self) -> psutil.Process:
        """The process that all others of this Ray come from."""
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def kill(self) -> None:
        """SIGKILL for the head and everything that it has started on this host."""
        assert self._process is not None
        doomed = self.root.children(recursive=True)
        self._process.kill()
        for p in doomed:
            try:
                p.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue
        self._process.wait(10)
        psutil.wait_procs(doomed, timeout=10)
        self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def named(root: psutil.Process, name: str) -> list[psutil.Process]:
    """Descendants by the start of their names: gcs_server, raylet, or ray::WorkerHost for the actors."""
    found = []
    for p in root.children(recursive=True):
        try:
            if (p.cmdline() or [p.name()])[0].split("/")[-1].startswith(name):
                found.append(p)
        except psutil.Error:
            continue
    return found
