"""Opens a worker's tiers: how large they are, and what their pages are of."""

from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import kilat
from kilat.base.errors import ConfigError
from kilat.cluster.worker.engine import AnyEngine
from kilat.cluster.worker.mover import Roads
from kilat.cluster.worker_config import WorkerConfig
from kilat.kv.board import Board
from kilat.kv.disk_tier import KEY_BYTES, DiskTier
from kilat.kv.host_tier import HostTier
from kilat.kv.tier import Tier
from kilat.kv.tier_store import TierStore
from kilat.kv.transport import layout_digest

SIZES = frozenset(
    (
        "kv_cache_bytes",
        "max_model_len",
        "max_num_seqs",
        "max_step_tokens",
        "max_waiting",
        "depth",
        "prefix_cache",
        "shared_pool",
        "target_step_s",
        "threads",
    )
)
"""Settings of an engine that no bit of a page depends on."""


def with_tiers(config: WorkerConfig, engine: AnyEngine, roads: Roads | None) -> Roads | None:
    """``roads`` with the tiers of the configuration, if it has some. Their memory is added to the engine's ledger. Raises ConfigError
    when one cannot be used with this engine."""
    if not config.disk_cache_bytes and not config.host_cache_bytes:
        return roads
    settings: dict[str, Any] = msgspec.json.decode(config.engine)
    if not settings.get("prefix_cache", True):
        return roads
    memory, tiers, n_room = engine.pages, list[Tier](), 0
    page_bytes, n_pages = memory.layout.page_bytes, engine.info.n_pages
    if config.disk_cache_bytes:
        key = content_key(settings, layout_digest(memory.layout), engine.info.kernels)
        tiers.append(DiskTier(Path(config.disk_cache_dir), key, page_bytes, config.disk_cache_bytes))
    if config.host_cache_bytes:
        if isinstance(memory.view, np.ndarray):
            raise ConfigError(
                "a host cache is for pages on a CUDA device, and these are in the host's memory: "
                "use a larger --kv-cache-memory-bytes, or --disk-cache-gb"
            )
        n_room = config.host_cache_bytes // page_bytes
        room = memory.host_bytes(n_room * page_bytes).reshape(n_room, page_bytes)
        tiers.insert(0, HostTier(room, tiers[0].put) if tiers else HostTier(room))
    store = TierStore(tiers, memory, n_pages, page_bytes)
    engine.info.ledger_bytes["tiers"] = store.n_buffer_bytes + n_room * page_bytes
    return replace(roads or Roads([], Board(shared=False), memory.layout), store=store)


def content_key(settings: dict[str, Any], layout: bytes, kernels: str) -> bytes:
    """Names all that the bits of a page depend on besides its tokens: a file of pages outlives this process, so the names of the pages,
    which say what the model is called, are not enough. Weights are known by sizes and times of their files."""
    told = {k: v for k, v in settings.items() if k not in SIZES}
    files = _files(Path(settings["model_path"])) if "model_path" in settings else []
    parts = (kilat.__version__, kernels, layout, sorted(told.items()), files)
    return blake2b(msgspec.msgpack.encode(parts), digest_size=KEY_BYTES).digest()


def _files(model: Path) -> list[tuple[str, int, int]]:
    paths = sorted(p for p in model.iterdir() if p.is_file()) if model.is_dir() else [model]
    stats = [(p.name, p.stat()) for p in paths]
    return [(name, s.st_size, s.st_mtime_ns) for name, s in stats]
