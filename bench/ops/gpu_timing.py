"""Times sequences of launches on a GPU: captured in a graph, replayed, median of several replays, caches cold by rotation of buffers."""

import statistics
from collections.abc import Callable, Sequence

import torch

COPY_BYTES_S = 4.3e12
"""Device-to-device copy of an H200, bytes read plus bytes written a second; the roof of everything that streams."""
BF16_FLOP_S = 788e12
"""bf16 matrix product of 8192^3 on an H200, random data; the roof of everything that multiplies."""


def graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """All calls in order as one graph; each runs once before, so that nothing is compiled while capturing."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, repeats: int = 15, warmup: int = 3) -> float:
    """Median microseconds of one replay."""
    for _ in range(warmup):
        graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(e) for b, e in times) * 1e3


def call_us(calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
    """Median microseconds of one call among ``calls`` run back to back; give as many as rotate the data out of the cache."""
    return replay_us(graph_of(calls), repeats) / len(calls)
