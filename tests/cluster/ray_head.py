"""A Ray of one host for tests: started, killed all at once, started again at the same address."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
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
    """``address`` stays when it is killed and started again. ``stop()`` must be called."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray"))  # short: sockets lie in it
        self.address = f"127.0.0.1:{free_port()}"
        self.env = {
            **os.environ,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            **GONE_AFTER,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        host, port = self.address.split(":")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                *(
                    "--node-ip-address",
                    host,
                    "--port",
                    port,
                    "--num-cpus",
                    "4",
                    "--include-dashboard",
                    "false",
                ),
                *("--object-store-memory", str(80 << 20), "--temp-dir", str(self.folder)),
            ],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_S
        while not (
            named(self.root, "gcs_server") and named(self.root, "raylet") and _listens(host, int(port))
        ):
            assert self._process.poll() is None and time.monotonic() < deadline, "Ray did not start"
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


def _listens(host: str, port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex((host, port)) == 0
