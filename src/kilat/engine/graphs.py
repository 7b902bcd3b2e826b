"""CUDA graphs of decode steps: the only owner of graphs, their buffers and their memory.

A decode step (every row one token) of a captured shape is one launch: the inputs are copied into a fixed buffer, the graph is
replayed, the sampled ids stay on the device for the next step. Shapes are buckets of rows and of context length; one is captured when
it is met for the second time, so the first answers come before any capture.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kilat.ops.batch import StepBatch
from kilat.ops.sample import Draws

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
KV_BUCKETS = (1024, 4096, 16_384, 65_536, 262_144)
_INTS = ("token_ids", "positions", "kv_len", "slots", "row_slot", "top_k")
_FLOATS = ("temperature", "top_p", "min_p", "u")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a graph was captured for. ``mode`` is ``greedy``, ``draw`` or ``filtered`` (see ops.sample.draw)."""

    rows: int
    max_kv_len: int
    mode: str


class DecodeBuffer:
    """Inputs of one decode step of up to ``max_rows`` rows in one int32 buffer: pinned on the host (two, used in turn, for a copy may still
    be under way when the next step is written), one on the device. Fields of a bucket lie one behind the other."""

    def __init__(self, max_rows: int, max_pages: int, device: torch.device) -> None:
        self.max_rows, self.max_pages = max_rows, max_pages
        size = max_rows * (len(_INTS) + len(_FLOATS) + max_pages)
        pinned = device.type == "cuda"
        self._host = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._turn = 0

    def host(self, rows: int) -> dict[str, np.ndarray]:
        """Arrays to fill for a step of ``rows`` rows; valid until the next but one call."""
        self._turn ^= 1
        flat = self._host[self._turn].numpy()
        fields = {name: flat[i * rows : (i + 1) * rows] for i, name in enumerate(_INTS + _FLOATS)}
        for name in _FLOATS:
            fields[name] = fields[name].view(np.float32)
        first = len(fields) * rows
        fields["page_table"] = flat[first : first + rows * self.max_pages].reshape(rows, self.max_pages)
        return fields

    def send(self, rows: int) -> None:
        """Copy what was filled to the device; returns before the copy is done."""
        n = rows * (len(_INTS) + len(_FLOATS) + self.max_pages)
        self._device[:n].copy_(self._host[self._turn][:n], non_blocking=True)

    def device(self, rows: int) -> dict[str, Tensor]:
        """The same fields as views of the device buffer."""
        fields = {name: self._device[i * rows : (i + 1) * rows] for i, name in enumerate(_INTS + _FLOATS)}
        for name in _FLOATS:
            fields[name] = fields[name].view(torch.float32)
        first = len(fields) * rows
        fields["page_table"] = self._device[first : first + rows * self.max_pages].view(rows, self.max_pages)
        return fields


class DecodeGraphs:
    """Runs decode steps whose inputs are in ``buffer``. ``step(batch, row_slot, draws, filtered)`` computes, stores and returns the
    sampled ids [rows] int32; it must launch work on the current stream only."""

    def __init__(
        self,
        buffer: DecodeBuffer,
        page_tokens: int,
        step: Callable[[StepBatch, Tensor, Draws | None, bool], Tensor],
        capture: bool,
    ) -> None:
        self.buffer, self.page_tokens, self.step, self.capture = buffer, page_tokens, step, capture
        self.captured: dict[Shape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.n_bytes = 0
        self._met: set[Shape] = set()
        self._pool = torch.cuda.graph_pool_handle() if capture else None

    def run(self, shape: Shape) -> Tensor:
        """Sampled ids [shape.rows] int32 of the step that was sent last; overwritten by the next step of this shape."""
        done = self.captured.get(shape)
        if done is None and self.capture and shape in self._met:
            done = self._capture(shape)
        if done is not None:
            done[0].replay()
            return done[1]
        self._met.add(shape)
        return self._compute(shape)

    def _compute(self, shape: Shape) -> Tensor:
        f = self.buffer.device(shape.rows)
        index = torch.arange(shape.rows + 1, dtype=torch.int32, device=f["slots"].device)
        batch = StepBatch(
            token_ids=f["token_ids"],
            positions=f["positions"],
            row_start=index,
            kv_len=f["kv_len"],
            page_table=f["page_table"],
            slots=f["slots"],
            logits_at=index[:-1],
            page_tokens=self.page_tokens,
            max_kv_len=shape.max_kv_len,
            max_q_len=1,
        )
        draws = None
        if shape.mode != "greedy":
            draws = Draws(f["temperature"], f["top_k"], f["top_p"], f["min_p"], f["u"])
        return self.step(batch, f["row_slot"], draws, shape.mode == "filtered")

    def close(self) -> None:
        """Give back the graphs and their memory."""
        self.captured.clear()

    def _capture(self, shape: Shape) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture on a stream of its own; the buffers hold a step's inputs, which the capture does not touch.

        TRAP: a graph that the garbage collector frees during a capture breaks that capture, so the collector waits.
        """
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                out = self._compute(shape)
        finally:
            if collecting:
                gc.enable()
        # the caching allocator may give memory back meanwhile: then the graph is said to cost nothing, not less
        self.n_bytes += max(0, torch.cuda.memory_reserved() - before)
        self.captured[shape] = (graph, out)
        return self.captured[shape]


def bucket(value: int, buckets: tuple[int, ...], limit: int) -> int:
    """The smallest bucket that holds ``value``, at most ``limit``."""
    return min(next((b for b in buckets if b >= value), limit), limit)
