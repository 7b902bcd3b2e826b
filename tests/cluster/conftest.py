"""The tiny model, and servers that are real processes with the fake engine."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_head import RayHead
from served import Served, Stream
from tiny_model import TinyFiles, write_tiny_model
from worker_pair import Worker

from kilat.kv.local import LocalHub


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyFiles:
    """Files of the tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory, tiny: TinyFiles) -> Iterator[Served]:
    """A server with default settings for tests that leave it as they found it."""
    server = Served(tmp_path_factory.mktemp("server"), tiny.path)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def ray_head() -> Iterator[RayHead]:
    """One Ray for the tests of a file that leave it as they found it, or start it again. Not for longer: a server that is told ``auto``
    joins a Ray that runs."""
    head = RayHead()
    yield head
    head.stop()


@pytest.fixture
def start(tmp_path: Path, tiny: TinyFiles) -> Iterator[Callable[..., Served]]:
    """Starts servers of one test with its own settings."""
    running: list[Served] = []

    def make(**options: Any) -> Served:
        folder = tmp_path / f"server{len(running)}"
        folder.mkdir()
        server = Served(folder, options.pop("model_path", tiny.path), **options)
        running.append(server)
        return server

    yield make
    for server in running:
        server.stop()


@pytest.fixture
def streams() -> Iterator[Callable[..., Stream]]:
    """Opens streams that are closed with the test."""
    made: list[Stream] = []

    def make(*args: Any, **options: Any) -> Stream:
        made.append(Stream(*args, **options))
        return made[-1]

    yield make
    for stream in made:
        stream.close()


@pytest.fixture
def start_worker() -> Iterator[Callable[..., Worker]]:
    """Starts worker loops in threads: ``start_worker(name, transport, **settings of the engine)``."""
    hub = LocalHub()
    made: list[Worker] = []

    def make(name: str, transport: Any = "local", **settings: Any) -> Worker:
        made.append(Worker(name, hub, transport, **settings))
        return made[-1]

    yield make
    for w in made:
        w.stop()
