"""Which transports a worker has, by its configuration and by where its pages lie."""

from collections.abc import Callable

import numpy as np

from kilat.base.errors import ConfigError
from kilat.base.log import get_logger
from kilat.cluster.worker.engine import PoolMemory
from kilat.cluster.worker.mover import Roads
from kilat.cluster.worker_config import WorkerConfig
from kilat.kv.board import Board
from kilat.kv.shm import ShmTransport
from kilat.kv.tcp import TcpTransport
from kilat.kv.transport import Pages, Transport

_log = get_logger("worker")

KINDS = ("shm", "tcp", "nixl", "cuda_ipc")

Make = Callable[[Pages, Board], Transport]


def check_kinds(config: WorkerConfig) -> None:
    """Raises ConfigError for a transport that does not exist."""
    for kind in config.transports:
        if kind not in KINDS:
            raise ConfigError(f"transport is {kind!r}; use {', '.join(KINDS)}")


def open_roads(config: WorkerConfig, memory: PoolMemory, nixl: Make | None = None) -> Roads:
    """The transports of the configuration that read pages in the host's memory. ``nixl`` makes that
    kind, whose package need not be installed. Raises ConfigError when one does not exist or cannot be used as the engine was started."""
    check_kinds(config)
    board = Board()
    transports: list[Transport] = []
    if isinstance(memory.view, np.ndarray):
        pages = Pages(memory.layout, memory.view, memory.fd)
        for kind in config.transports:
            if kind == "shm":
                transports.append(ShmTransport(pages, board))
            elif kind == "nixl" and nixl is not None:
                transports.append(nixl(pages, board))
            elif kind == "tcp":
                transports.append(TcpTransport(pages, board, config.secret.encode(), host=config.page_host))
    if not transports:
        kinds = ", ".join(config.transports)
        _log.warning(
            "no transport of %s reads pages that lie where this engine's do: they are computed again", kinds
        )
    return Roads(transports, board, memory.layout)
