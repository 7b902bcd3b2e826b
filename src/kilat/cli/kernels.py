"""Builds the CPU kernels before a model is loaded, where a person sees that it takes a while, or why the slow ones are used instead."""

import argparse
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kilat.base.env import cuda_devices
from kilat.base.errors import ConfigError
from kilat.ops.cpu.build import build

SLOW_AFTER_S = 1.0


@contextmanager
def told_when_slow(text: str) -> Iterator[None]:
    """Say ``text`` on standard error when the block takes longer than :data:`SLOW_AFTER_S`."""
    timer = threading.Timer(SLOW_AFTER_S, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def prepare(args: argparse.Namespace, warn: Callable[[str], None]) -> None:
    """Build the kernels that the engine flags in ``args`` ask for on this machine's CPU; ``warn`` hears why that cannot be done and
    slow ones are used. Nothing on CUDA devices, or where other kernels were asked for.
    """
    on_cuda = args.device == "cuda" or (args.device != "cpu" and cuda_devices())
    if on_cuda or args.kernels not in (None, "auto"):
        return
    try:
        with told_when_slow("building the CPU kernels, once: up to a minute"):
            build()
    except ConfigError as e:
        warn(f"answers take many times longer than they need to, without native kernels: {e.message}")
