"""``python -m kilat.cluster.worker CONFIG.json``: a worker with the real engine. Started by the supervisor, not by people."""

import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec

from kilat.cluster.worker.main import run_worker
from kilat.engine.build import build_engine
from kilat.engine.config import EngineConfig
from kilat.engine.core import Engine
from kilat.text.tokenizer import Tokenizer


def make_engine(settings: bytes) -> Engine:
    """The engine of an EngineConfig in JSON. The tokenizer goes with it for the grammar library."""
    config = msgspec.json.decode(settings, type=EngineConfig)
    files = SimpleNamespace(kind=config.model_kind, path=Path(config.model_path))
    return build_engine(config, tokenizer_json=Tokenizer.from_files(files).to_json())


if __name__ == "__main__":
    sys.exit(run_worker(Path(sys.argv[1]), make_engine))
