"""What ran on a CUDA device, from torch's profiler, on the clock of ``time.time_ns``."""

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from kilat.engine.utilisation import Span

WAITS = "DeviceSynchronize"


class TraceEvent(Protocol):
    """What is read of an event of torch's profiler."""

    def name(self) -> str: ...

    def start_ns(self) -> int: ...

    def duration_ns(self) -> int: ...

    def device_type(self) -> DeviceType: ...

    def correlation_id(self) -> int: ...


class CudaTrace:
    """Records what runs on the current CUDA device between :meth:`start` and :meth:`stop`, which both wait for it.

    Kernels run slower meanwhile, those of graphs in particular. The first profile of a process takes long to begin: it is made here.
    """

    def __init__(self) -> None:
        with self._new():
            torch.cuda.synchronize()
        self._running: profile | None = None
        self._bracket = (0, 0)

    def _new(self) -> profile:
        return profile(activities=[ProfilerActivity.CUDA])

    def start(self) -> None:
        self._running = self._new()
        self._running.start()
        torch.cuda.synchronize()
        begin = time.time_ns()
        torch.cuda.synchronize()
        self._bracket = (begin, time.time_ns())

    def stop(self) -> list[Span]:
        """Everything since :meth:`start`; empty when the profiler may not look at the device."""
        assert self._running is not None
        torch.cuda.synchronize()
        self._running.stop()
        recorded = self._running.profiler
        assert recorded is not None and recorded.kineto_results is not None
        self._running = None
        return to_spans(recorded.kineto_results.events(), self._bracket)


def to_spans(events: Sequence[TraceEvent], bracket: tuple[int, int]) -> list[Span]:
    """Kernels and copies. ``bracket``: times of the host's clock around a call that waited for the device; if no such call lies in it, the
    profiler's clock is another one, and its times are shifted by the least that puts one there."""
    host = [e for e in events if e.device_type() == DeviceType.CPU]
    waits = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in host if WAITS in e.name()]
    shift = clock_shift(waits, bracket)
    queued = {e.correlation_id(): e.start_ns() + e.duration_ns() + shift for e in host if e.correlation_id()}
    return [
        Span(
            e.start_ns() + shift,
            e.start_ns() + e.duration_ns() + shift,
            e.name(),
            queued.get(e.correlation_id()),
            e.name().startswith(("Memcpy", "Memset")),
        )
        for e in events
        if e.device_type() == DeviceType.CUDA
    ]


def clock_shift(waits: Iterable[tuple[int, int]], bracket: tuple[int, int]) -> int:
    """Nanoseconds to add to ``waits`` for one of them to lie in ``bracket``, the least; 0 when there is none at all."""
    begin, end = bracket
    shifts = (begin - a if a < begin else min(0, end - b) for a, b in waits)
    return min(shifts, key=abs, default=0)
