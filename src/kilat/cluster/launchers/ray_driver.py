"""``python -m kilat.cluster.launchers.ray_driver``: the one process that speaks to Ray, for one gateway, until its standard input ends.

It is apart from the gateway because Ray ends its drivers when its head is gone for a while. All its actors end with it; workers do not,
for they have left their actors (see ``guard``), and a later driver finds them again.
"""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kilat.base.log import event, get_logger, setup
from kilat.cluster.launchers.host import WorkerHost
from kilat.cluster.launchers.ray_wire import (
    Down,
    Exited,
    Failed,
    Find,
    FromDriver,
    Lost,
    Setup,
    Signal,
    Start,
    Started,
    ToDriver,
    Up,
    line,
    to_driver,
)
from kilat.cluster.worker_config import WorkerConfig

CONNECT_S = 5.0
LOOK_S, SAY_S = 1.0, 30.0
LOCAL_STORE_BYTES = 80 * 1024 * 1024
THREADS = 4
"""Of an actor: one waits, others take signals."""

_log = get_logger("ray")


class Unwanted(Exception):
    """The gateway does not want this worker any more."""


class Driver:
    """Each worker has a thread here, which starts it and then waits for its end."""

    def __init__(self, settings: Setup, send: Callable[[FromDriver], None]) -> None:
        self._settings = settings
        self._send = send
        self._lock = threading.Lock()
        self._actors: dict[str, Any] = {}
        self._unwanted: set[str] = set()
        _connect(settings.address)
        self._here = ray.get_runtime_context().get_node_id()
        bundle = {"CPU": settings.cpus, "GPU": settings.gpus}
        bundles = [{k: v for k, v in bundle.items() if v} for _ in range(settings.places)]
        self._group: PlacementGroup = placement_group(bundles, strategy="SPREAD")

    def handle(self, message: ToDriver) -> None:
        """Take in one message; does not block."""
        if isinstance(message, Start | Find):
            threading.Thread(target=self._live, args=(message,), daemon=True).start()
        elif isinstance(message, Signal):
            with self._lock:
                actor = self._actors.get(message.key)
                if actor is None:
                    self._unwanted.add(message.key)
            if actor is not None:
                actor.signal.remote(message.number)

    def _live(self, message: Start | Find) -> None:
        """A worker's life, as far as it can be seen from here."""
        actor, key = None, message.key
        try:
            actor = self._place(message)
            started = self._begin(actor, message)
            if started is None:
                return
            with self._lock:
                self._actors[key] = actor
                unwanted = key in self._unwanted
            self._send(started)
            if unwanted:
                ray.get(actor.signal.remote(signal.SIGKILL))
            self._send(Exited(key, ray.get(actor.wait.remote())))
        except Unwanted:
            self._send(Failed(key, "it is not wanted any more"))
        except RayTaskError as e:
            self._send(Failed(key, f"{type(e.cause).__name__}: {e.cause}", final=True))
        except (RayError, OSError) as e:
            why = str(e).partition("\n")[0]
            self._send(Lost(key, why) if key in self._actors else Failed(key, why))
        finally:
            with self._lock:
                self._actors.pop(key, None)
                self._unwanted.discard(key)
            if actor is not None:
                ray.kill(actor)

    def _place(self, message: Start | Find) -> Any:
        """An actor in the place of the worker; waits until a host has room for it."""
        host: Any = ray.remote(WorkerHost).options(
            num_cpus=self._settings.cpus,
            num_gpus=self._settings.gpus,
            max_restarts=0,
            max_concurrency=THREADS,
            scheduling_strategy=self._where(message.place),
        )
        actor = host.remote()
        ready = actor.__ray_ready__.remote()
        said_at_s = time.monotonic() - SAY_S + 2 * LOOK_S
        while message.key not in self._unwanted:
            try:
                ray.get(ready, timeout=LOOK_S)
                return actor
            except GetTimeoutError:
                if time.monotonic() - said_at_s > SAY_S:
                    said_at_s = time.monotonic()
                    event(
                        _log,
                        "worker_waits_for_room",
                        worker=message.key,
                        cpus=self._settings.cpus,
                        gpus=self._settings.gpus,
                    )
        ray.kill(actor)
        raise Unwanted

    def _where(self, place: int) -> Any:
        """Room for the first workers is set aside together; an added one asks for its own, which lets Ray add a host for it."""
        if place >= self._settings.places:
            return "SPREAD"
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)

    def _begin(self, actor: Any, message: Start | Find) -> Started | None:
        key = message.key
        node_id = ray.get(actor.__ray_call__.remote(_node_id))
        addresses = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes()}
        if (address := addresses.get(node_id)) is None:
            self._send(Failed(key, "its host has left Ray"))
            return None
        if self._settings.one_host and node_id != self._here:
            why = "Ray put it on another host, which cannot reach this one at its loopback address: give --control-host"
            self._send(Failed(key, why, final=True))
            return None
        if isinstance(message, Find):
            if not ray.get(actor.find.remote(message.folder, message.pid)):
                self._send(Failed(key, f"process {message.pid} is not known on host {address}"))
                return None
            return Started(key, message.pid, message.folder, address)
        config = msgspec.json.decode(message.config, type=WorkerConfig)
        if not self._settings.one_host:
            config = msgspec.structs.replace(config, page_host=address)
        pid, folder = ray.get(actor.start.remote(message.command, msgspec.json.encode(config)))
        return Started(key, pid, folder, address)


def _node_id(host: object) -> str:
    return str(ray.get_runtime_context().get_node_id())


def _connect(address: str) -> None:
    """Join the Ray that runs, or with ``auto`` start one of this host alone. Raises OSError, RuntimeError, ValueError."""
    if address != "auto":  # Ray would try for a minute
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), CONNECT_S).close()
    quiet: dict[str, Any] = {"logging_level": logging.WARNING, "configure_logging": False}
    try:
        ray.init(address=address, **quiet)
    except ConnectionError:
        if address != "auto":
            raise
        _log.warning("no Ray runs here: starting one for this host alone")
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=LOCAL_STORE_BYTES,
            **quiet,
        )


def main() -> int:
    """Serve one gateway; returns the exit code."""
    setup("ray")
    # What Ray and its actors print belongs to the log; standard output is for messages alone.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    lock = threading.Lock()

    def send(message: FromDriver) -> None:
        with lock:
            out.write(line(message))

    settings = to_driver.decode(sys.stdin.buffer.readline())
    assert isinstance(settings, Setup)
    try:
        driver = Driver(settings, send)
    except (OSError, RuntimeError, ValueError, RayError) as e:
        send(Down(str(e).partition("\n")[0]))
        return 1
    send(Up())
    for text in sys.stdin.buffer:
        driver.handle(to_driver.decode(text))
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
