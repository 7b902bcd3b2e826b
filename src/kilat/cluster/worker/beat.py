"""Signs of life from a thread of its own, so that they go on while the engine is in a long step."""

import os
import threading
import time

from kilat.base import metrics as names
from kilat.base.errors import PeerError
from kilat.cluster.worker.channel import Channel
from kilat.cluster.worker_config import EXIT_LINK_LOST, EXIT_ORPHAN, WorkerConfig
from kilat.wire.messages import Status

SUFFIX = ".beat"


class Pulse:
    """What the loop tells of itself. Written by the loop, read by the beat: whole objects are replaced, never changed."""

    def __init__(self) -> None:
        self.step = 0
        self.busy = False
        self.draining = False
        self.step_began_s: float | None = None
        self.counters: dict[str, float] = {}
        self.gauges: dict[str, float] = {}
        self.pages_seq = -1

    def status(self) -> Status:
        """A Status of now, with the age of the step that is running."""
        began_s = self.step_began_s
        age_s = time.monotonic() - began_s if began_s is not None else 0.0
        gauges = {**self.gauges, names.STEP_AGE: age_s}
        return Status(self.step, self.busy, self.draining, self.counters, gauges, self.pages_seq)


class Beat:
    """Sends a Status every ``status_interval_s``. Ends the process when its parent or the connection to the gateway is gone, even in the
    middle of a step."""

    def __init__(self, config: WorkerConfig, pulse: Pulse) -> None:
        self._config = config
        self._pulse = pulse
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; returns when its socket is closed."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        c = self._config
        channel = Channel(c.address, c.secret, c.worker_id, suffix=SUFFIX)
        while not self._stop.wait(c.status_interval_s):
            if os.getppid() != c.parent_pid:
                os._exit(EXIT_ORPHAN)
            channel.send(self._pulse.status())
            try:
                channel.receive(0.0)
            except PeerError:
                os._exit(EXIT_LINK_LOST)
        channel.close()
