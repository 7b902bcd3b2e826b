"""Which transports a worker gets."""

from types import SimpleNamespace

import msgspec
import pytest
from sched_engine import Memory

from kilat.base.errors import ConfigError
from kilat.cluster.config import ServeConfig
from kilat.cluster.worker.mover import Roads
from kilat.cluster.worker.roads import open_roads
from kilat.cluster.worker_config import WorkerConfig
from kilat.kv.board import Board
from kilat.kv.local import LocalHub, LocalTransport
from kilat.kv.transport import Pages, Transport

pytestmark = pytest.mark.logic


def config(*transports: str) -> WorkerConfig:
    return WorkerConfig(
        address="", secret="x", worker_id="w", parent_pid=1, engine=msgspec.Raw(b"{}"), transports=transports
    )


def kinds(roads: Roads) -> list[str]:
    told = [t.kind for t in roads.transports]
    for t in roads.transports:
        t.close()
    roads.board.close()
    return told


def test_transports_come_in_the_order_of_the_configuration() -> None:
    assert kinds(open_roads(config("tcp", "shm"), Memory(4, 4))) == ["tcp", "shm"]


def test_transport_for_other_memory_is_left_out() -> None:
    assert kinds(open_roads(config("cuda_ipc", "tcp"), Memory(4, 4))) == ["tcp"]
    on_device = SimpleNamespace(layout=Memory(4, 4).layout, view=object(), fd=None)
    assert kinds(open_roads(config("shm", "tcp"), on_device)) == []


def test_nixl_is_made_where_it_is_asked_for_only() -> None:
    made: list[Board] = []

    def make(pages: Pages, board: Board) -> Transport:
        made.append(board)
        return LocalTransport(LocalHub(), pages, board)

    assert kinds(open_roads(config("nixl", "tcp"), Memory(4, 4), make)) == ["local", "tcp"]
    assert kinds(open_roads(config("tcp"), Memory(4, 4), make)) == ["tcp"]
    assert len(made) == 1


def test_unknown_transport_is_refused() -> None:
    with pytest.raises(ConfigError, match="'pigeon'; use shm"):
        open_roads(config("tcp", "pigeon"), Memory(4, 4))


def test_pool_that_is_not_shared_cannot_be_mapped() -> None:
    memory = Memory(4, 4)
    private = SimpleNamespace(layout=memory.layout, view=memory.view, fd=None)
    with pytest.raises(ConfigError, match="shared_pool"):
        open_roads(config("shm"), private)


def test_default_kinds_leave_out_those_for_other_memory() -> None:
    default = next(f.default for f in msgspec.structs.fields(ServeConfig) if f.name == "transports")
    assert kinds(open_roads(config(*default), Memory(4, 4))) == ["shm", "tcp"]
    assert "cuda_ipc" in default
