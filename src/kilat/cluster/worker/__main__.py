"""``python -m kilat.cluster.worker CONFIG.json``: a worker with the real engine. Started by the supervisor, not by people."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import msgspec
import torch

from kilat.base.errors import ConfigError
from kilat.cluster.worker.engine import PoolMemory
from kilat.cluster.worker.main import run_worker
from kilat.cluster.worker.mover import Roads
from kilat.cluster.worker.roads import check_kinds, open_roads
from kilat.cluster.worker_config import WorkerConfig
from kilat.engine.build import build_engine
from kilat.engine.config import EngineConfig
from kilat.engine.core import Engine
from kilat.kv.board import Board
from kilat.kv.cuda_ipc import CudaIpcTransport
from kilat.kv.transport import Pages, Transport
from kilat.text.tokenizer import Tokenizer


def make_engine(settings: bytes) -> Engine:
    """The engine of an EngineConfig in JSON. The tokenizer goes with it for the grammar library."""
    config = msgspec.json.decode(settings, type=EngineConfig)
    files = SimpleNamespace(kind=config.model_kind, path=Path(config.model_path))
    return build_engine(config, tokenizer_json=Tokenizer.from_files(files).to_json())


def make_roads(config: WorkerConfig, memory: PoolMemory) -> Roads:
    """Ways for pages on a CUDA device, or else those for pages in the host's memory."""
    if not isinstance(memory.view, torch.Tensor) or CudaIpcTransport.kind not in config.transports:
        return open_roads(config, memory, make_nixl)
    from kilat.kv.cuda_copy import copy_pages

    check_kinds(config)
    board = Board()
    transport = CudaIpcTransport(memory.layout, memory.view, board, copy_pages)
    return Roads([transport], board, memory.layout)


def make_nixl(pages: Pages, board: Board) -> Transport:
    """A NIXL transport. Raises ConfigError when its package is not installed."""
    if find_spec("nixl") is None:
        raise ConfigError("the transport nixl needs the package nixl: install kilat[nixl], or leave it out")
    from kilat.kv.nixl import NixlTransport

    return NixlTransport(pages, board)


if __name__ == "__main__":
    sys.exit(run_worker(Path(sys.argv[1]), make_engine, make_roads))
