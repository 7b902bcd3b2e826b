"""The only file that reads the process environment.

``KILAT_LOG`` (debug, info, warning; default info) and ``KILAT_CACHE_DIR`` (default ``~/.cache/kilat``) are all there is of its own; every
other setting is a flag or a config field. ``CUDA_VISIBLE_DEVICES`` is read, and set for workers, because CUDA has no other way.
"""

import os
from pathlib import Path

from kilat.base.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning")


def log_level() -> str:
    """Log level name, upper case. Raises ConfigError for one that is not known."""
    level = os.environ.get("KILAT_LOG") or "info"
    if level.lower() not in LOG_LEVELS:
        raise ConfigError(f"KILAT_LOG is {level!r}; use one of {', '.join(LOG_LEVELS)}")
    return level.upper()


def cache_dir() -> Path:
    """Folder for downloaded models and built kernels. It is not created here."""
    given = os.environ.get("KILAT_CACHE_DIR")
    return Path(given) if given else Path.home() / ".cache" / "kilat"


def cuda_devices(drivers: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Names of the CUDA devices that this process may use: those it was given, else all that the driver knows."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip() not in ("", "-1")]
    return [str(i) for i in range(len(list(drivers.iterdir())))] if drivers.is_dir() else []


def child_environment(**extra: str) -> dict[str, str]:
    """A copy of the environment for a process that kilat starts, with ``extra`` added."""
    return {**os.environ, **extra}
