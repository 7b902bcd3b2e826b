"""The only file that reads the process environment.

``KILAT_LOG`` (debug, info, warning; default info) and ``KILAT_CACHE_DIR`` (default ``~/.cache/kilat``) are all there is; every
other setting is a flag or a config field.
"""

import os
from pathlib import Path


def log_level() -> str:
    """Log level name, upper case."""
    return os.environ.get("KILAT_LOG", "info").upper()


def cache_dir() -> Path:
    """Folder for downloaded models and built kernels. It is not created here."""
    given = os.environ.get("KILAT_CACHE_DIR")
    return Path(given) if given else Path.home() / ".cache" / "kilat"


def child_environment(**extra: str) -> dict[str, str]:
    """A copy of the environment for a process that kilat starts, with ``extra`` added."""
    return {**os.environ, **extra}
