"""Logging: one line per event, ``key=value`` pairs, request id first. No prompt text is ever logged."""

import logging
import sys

from kilat.base import env


def get_logger(name: str) -> logging.Logger:
    """A logger below ``kilat``; handlers are installed by :func:`setup` only, so importing kilat prints nothing."""
    return logging.getLogger(f"kilat.{name}")


def setup(process: str) -> None:
    """Install one stderr handler for this process. Call once, from a process's entry point."""
    root = logging.getLogger("kilat")
    root.setLevel(env.log_level())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s {process} %(name)s %(message)s"))
    root.handlers[:] = [handler]
    root.propagate = False


def event(logger: logging.Logger, name: str, **fields: object) -> None:
    """Log ``name`` with ``key=value`` fields at info level."""
    logger.info("%s", name + "".join(f" {k}={v}" for k, v in fields.items()))
