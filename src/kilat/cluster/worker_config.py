"""What supervisor and worker agree on: the file that a worker is started with, and the codes that it exits with."""

import os
from pathlib import Path

import msgspec

EXIT_STEP_FAILED = 70
EXIT_START_FAILED = 71
EXIT_ORPHAN = 75
EXIT_LINK_LOST = 76
EXIT_BAD_CONFIG = 78  # starting again would fail again


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the gateway is, who this worker is, and the engine's settings as JSON that its factory reads.

    ``parent_pid``: the process that started it, and without which it ends; filled in by its launcher.
    ``transports``: how other workers may read its pages and it theirs, best first; none for a worker that is alone. ``shm`` (the engine
    needs ``shared_pool``), ``tcp`` (listens on ``page_host``) and ``nixl`` (authenticates nobody) are for pages in the host's memory, ``cuda_ipc`` for pages on a CUDA
    device; those that do not fit are left out. ``offer_s``: seconds that pages stay pinned for others.
    ``host_cache_bytes`` and ``disk_cache_bytes`` (in a folder that is this worker's alone) keep pages that left the pool; 0: none.
    """

    address: str
    secret: str
    worker_id: str
    engine: msgspec.Raw
    parent_pid: int = 0
    status_interval_s: float = 0.5
    drain_s: float = 30.0
    transports: tuple[str, ...] = ()
    page_host: str = "127.0.0.1"
    offer_s: float = 30.0
    host_cache_bytes: int = 0
    disk_cache_bytes: int = 0
    disk_cache_dir: str = ""


def write_config(path: Path, config: WorkerConfig) -> None:
    """Write a new file that only its owner can read, for it holds a secret."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
        f.write(msgspec.json.encode(config))


def take_config(path: Path) -> WorkerConfig:
    """Read the file and delete it."""
    data = path.read_bytes()
    path.unlink()
    return msgspec.json.decode(data, type=WorkerConfig)
