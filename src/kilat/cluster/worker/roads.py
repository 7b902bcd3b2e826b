"""Which transports a worker has, by its configuration and by where its pages lie."""

import numpy as np

from kilat.base.errors import ConfigError
from kilat.cluster.worker.engine import PoolMemory
from kilat.cluster.worker.mover import Roads
from kilat.cluster.worker_config import WorkerConfig
from kilat.kv.board import Board
from kilat.kv.shm import ShmTransport
from kilat.kv.tcp import TcpTransport
from kilat.kv.transport import Pages, Transport


def open_roads(config: WorkerConfig, memory: PoolMemory) -> Roads:
    """The transports that the configuration names, for pages in the host's memory.

    Raises ConfigError for one that does not exist, or cannot read such pages.
    """
    if not isinstance(memory.view, np.ndarray):
        raise ConfigError("pages of a device are read with the cuda_ipc transport only")
    board = Board()
    pages = Pages(memory.layout, memory.view, memory.fd)
    return Roads([_open(kind, pages, board, config) for kind in config.transports], board, memory.layout)


def _open(kind: str, pages: Pages, board: Board, config: WorkerConfig) -> Transport:
    if kind == "shm":
        return ShmTransport(pages, board)
    if kind == "tcp":
        return TcpTransport(pages, board, config.secret.encode(), host=config.page_host)
    raise ConfigError(f"transport is {kind!r}; use shm or tcp")
