"""The life of a worker process: configuration, engine, loop, exit code."""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from kilat.base.errors import KilatError, PeerError
from kilat.base.log import get_logger, setup
from kilat.cluster.worker.beat import Beat, Pulse
from kilat.cluster.worker.channel import Channel
from kilat.cluster.worker.engine import AnyEngine, PoolMemory
from kilat.cluster.worker.loop import WorkerLoop
from kilat.cluster.worker.mover import Roads
from kilat.cluster.worker.roads import open_roads
from kilat.cluster.worker.tier_files import with_tiers
from kilat.cluster.worker_config import (
    EXIT_BAD_CONFIG,
    EXIT_LINK_LOST,
    EXIT_ORPHAN,
    EXIT_START_FAILED,
    EXIT_STEP_FAILED,
    WorkerConfig,
    take_config,
)
from kilat.wire.messages import Fatal

PR_SET_PDEATHSIG = 1

_log = get_logger("worker")

EngineFactory = Callable[[bytes], AnyEngine]


RoadsFactory = Callable[[WorkerConfig, PoolMemory], Roads]


def run_worker(path: Path, factory: EngineFactory, roads: RoadsFactory = open_roads) -> int:
    """Serve until drained; returns the exit code. ``factory`` makes the engine of the configuration's JSON, ``roads`` the ways of its
    pages."""
    setup("worker")
    config = take_config(path)
    _die_with(config.parent_pid)
    pulse = Pulse()
    beat = Beat(config, pulse)
    beat.start()
    channel = Channel(config.address, config.secret, config.worker_id)
    try:
        return _serve(config, channel, pulse, factory, roads)
    finally:
        beat.stop()
        channel.close()


def _serve(
    config: WorkerConfig, channel: Channel, pulse: Pulse, factory: EngineFactory, roads: RoadsFactory
) -> int:
    try:
        engine = factory(bytes(config.engine))
        ways = with_tiers(config, engine, roads(config, engine.pages) if config.transports else None)
    except KilatError as e:
        _log.error("%s", e.message)
        channel.send(Fatal(e.message))
        return EXIT_BAD_CONFIG
    except Exception as e:  # noqa: BLE001  (logged; the exit code says it)
        _log.exception("the engine could not be built")
        channel.send(Fatal(f"the engine could not be built ({type(e).__name__})"))
        return EXIT_START_FAILED
    loop = WorkerLoop(config.worker_id, engine, channel, pulse, ways, offer_s=config.offer_s)
    # what lives as long as the process is not looked through at every collection: that took a tenth of a second, all streams waiting
    gc.freeze()
    signal.signal(signal.SIGTERM, lambda number, frame: loop.drain(config.drain_s))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway, which then asks us
    try:
        loop.run()
    except PeerError as e:
        _log.error("%s", e.message)
        return EXIT_LINK_LOST
    except Exception as e:  # noqa: BLE001  (logged; the exit code says it)
        _log.exception("a step failed")
        channel.send(Fatal(f"a step failed ({type(e).__name__}: {e})"))
        return EXIT_STEP_FAILED
    finally:
        loop.close()
    engine.close()
    return 0


def _die_with(parent_pid: int) -> None:
    """Let Linux kill this process when the gateway dies; elsewhere the beat sees it within its interval."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before we got here
        os._exit(EXIT_ORPHAN)
