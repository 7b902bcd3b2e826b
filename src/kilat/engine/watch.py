"""Watches a running engine for some steps: how long they take, then what ran on the device meanwhile."""

import threading
import time
from collections.abc import Callable
from enum import Enum, auto
from itertools import pairwise
from typing import Protocol

import torch

from kilat.engine.core import Engine
from kilat.engine.device_trace import CudaTrace
from kilat.engine.timeline import MODEL, SCHEDULE, Unwatched
from kilat.engine.utilisation import (
    DeviceUse,
    Phase,
    Roofs,
    Span,
    Steps,
    Utilisation,
    device_use,
    utilisation,
)
from kilat.engine.work import Work
from kilat.policy.sched.plan import StepPlan

LEAD = 3
"""Steps after the start of a trace, which waits for the device, until they follow each other as before."""
NO_KERNELS = (
    "the profiler saw no kernel on the device: it may lack the right to look (see NVIDIA's ERR_NVGPUCTRPERM)"
)

TOO_SHORT = "the work ended before the device could be looked at; give more of it"


class Trace(Protocol):
    """Where device spans come from; ``CudaTrace`` is one."""

    def start(self) -> None: ...

    def stop(self) -> list[Span]: ...


class _Stage(Enum):
    BEFORE = auto()
    STEPS = auto()
    LEAD = auto()
    TRACED = auto()
    AFTER = auto()


class StepWatch:
    """Waits for ``when() > 0``, asked before every step, then times that many steps and, with a ``trace``, looks at as many more under it.

    Without a trace (on the CPU) the steps that are timed are looked at too: there the forward calls are what keeps the machine busy. It
    watches ``engine`` from now on, and leaves it alone when it is done. Its calls come from the engine's threads.
    """

    def __init__(self, engine: Engine, when: Callable[[], int], trace: Trace | None) -> None:
        self._engine, self._when, self._trace = engine, when, trace
        self._stage = _Stage.BEFORE
        self._n = 0
        self._n_launched = 0
        self._begin_ns = 0
        self._thread = 0
        self._plans: list[StepPlan] = []
        self._marks: list[tuple[int, int, str]] = []
        self._timed: tuple[int, int] | None = None
        self._watched: tuple[int, DeviceUse] | str = TOO_SHORT
        engine.watch(self)

    @property
    def done(self) -> bool:
        return self._stage is _Stage.AFTER

    # -- heard from the engine --------------------------------------------------------------------------------------------------------

    def mark(self, phase: str) -> None:
        now_ns, thread = time.time_ns(), threading.get_ident()
        if phase is SCHEDULE:
            self._thread = thread
            self._between_steps(now_ns)
        if self._stage is not _Stage.BEFORE:
            self._marks.append((now_ns, thread, phase))

    def launching(self, plan: StepPlan) -> None:
        self._n_launched += 1
        if self._stage is _Stage.STEPS:
            self._plans.append(plan)

    def _between_steps(self, now_ns: int) -> None:
        if self._stage is _Stage.BEFORE:
            self._n = self._when()
            if self._n > 0:
                self._enter(_Stage.STEPS, now_ns)
        elif self._stage is _Stage.LEAD:
            if self._n_launched >= LEAD:
                self._enter(_Stage.TRACED, now_ns)
        elif self._n_launched >= self._n:
            self._close(now_ns)

    def _enter(self, stage: _Stage, now_ns: int) -> None:
        self._stage, self._n_launched, self._begin_ns = stage, 0, now_ns

    def _close(self, end_ns: int) -> None:
        """End the window that is open."""
        begin_ns, n = self._begin_ns, self._n_launched
        if self._stage is _Stage.STEPS:
            self._timed = (begin_ns, end_ns)
            if self._trace is not None:
                self._trace.start()
                self._enter(_Stage.LEAD, end_ns)
                return
            self._look(self._forward_calls(end_ns), n, begin_ns, end_ns)
        elif self._trace is not None:
            spans = self._trace.stop()
            if self._stage is _Stage.TRACED:
                self._look(spans, n, begin_ns, end_ns)
        self._leave()

    def _leave(self) -> None:
        self._stage = _Stage.AFTER
        self._engine.watch(Unwatched())

    def _look(self, spans: list[Span], n_steps: int, begin_ns: int, end_ns: int) -> None:
        if n_steps:
            phases = self._phases(self._thread, end_ns)
            self._watched = (n_steps, device_use(spans, phases, begin_ns, end_ns)) if spans else NO_KERNELS

    def _phases(self, thread: int, end_ns: int) -> list[Phase]:
        """What ``thread`` did until ``end_ns``."""
        track = [(at, name) for at, ident, name in self._marks if ident == thread]
        return [
            Phase(a, b, name) for (a, name), (b, _) in pairwise([*track, (max(end_ns, track[-1][0]), "")])
        ]

    def _forward_calls(self, end_ns: int) -> list[Span]:
        threads = {ident for _, ident, _ in self._marks}
        phases = (p for t in threads for p in self._phases(t, end_ns))
        return [Span(p.begin_ns, p.end_ns, "forward call") for p in phases if p.name == MODEL]

    # -- the outcome ----------------------------------------------------------------------------------------------------------------------

    def finish(self, roofs: Roofs) -> Utilisation | None:
        """What was seen, also when the work ended first; None when that was before the first step. To be called between steps."""
        if self._stage is _Stage.BEFORE:
            self._leave()
        while not self.done:
            self._close(self._marks[-1][0])
        if self._timed is None or not self._plans:
            return None
        begin_ns, end_ns = self._timed
        work = Work(0.0, 0.0)
        for plan in self._plans:
            work += self._engine.info.work.step(plan.rows)
        steps = Steps(
            n=len(self._plans),
            wall_ns=end_ns - begin_ns,
            rows=sum(len(p.rows) for p in self._plans),
            tokens=sum(p.n_tokens for p in self._plans),
            read_bytes=work.read_bytes,
            flops=work.flops,
        )
        device = self._engine.pages.kv.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        busy = "kernels" if self._trace is not None else "forward calls"
        return utilisation(name, busy, steps, self._watched, roofs)


def watch_steps(engine: Engine, when: Callable[[], int]) -> StepWatch:
    """Watch ``engine`` with what its device has: a profiler on CUDA, which begins here and takes a moment; nothing on the CPU."""
    return StepWatch(engine, when, CudaTrace() if engine.pages.kv.device.type == "cuda" else None)
