"""CUDA graphs of steps: the only owner of graphs, their buffers and their memory.

A step of a captured shape is one launch: the inputs are copied into a fixed buffer, the graph is replayed, the sampled ids stay on the
device for the next step. Shapes are buckets of tokens, rows and context length; one is captured when it is met for the second time, so the
first answers come before any capture. Steps of more tokens than the largest bucket keep the device busy longer than their launches take.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kilat.base.log import event, get_logger
from kilat.ops.batch import StepBatch
from kilat.ops.sample import Draws

ROW_BUCKETS = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024
)  # fmt: skip
TOKEN_MULTIPLE = 256
"""Of the tokens of a step whose prompt share is bounded: the library's products take rows in tiles of 256. 64 streams and a prompt's chunk
took an H200 12.5 ms with 512 tokens together, 16 with 448, 17.8 with 640 and 21.8 with 768 (8B shapes)."""
MIXED_ROW_BUCKETS = (8, 32, 64, 128, 256, 512, 1024)
TOKEN_BUCKETS = (16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 896, 1024)
KV_BUCKETS = (2048, 16_384, 131_072, 1_048_576)
MIXED_KV_BUCKETS = KV_BUCKETS[1:]
"""Steps with prompt chunks take longer than a wider page table does, and need fewer graphs so."""
MOST_GRAPH_BYTES = 3 << 30
ALIGNMENT = 4
"""Ints by which every field begins: kernels are compiled anew for pointers that are not a multiple of 16 bytes."""
_TOKEN_INTS = ("token_ids", "positions", "slots", "token_slot")
_ROW_INTS = ("kv_len", "row_slot", "logits_at", "top_k")
_ROW_FLOATS = ("temperature", "top_p", "min_p", "u")

_log = get_logger("engine")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a graph was captured for: ``tokens`` of ``rows`` rows, at most ``max_q_len`` of a row.

    ``mode`` is ``greedy``, ``draw`` or ``filtered`` (see ops.sample.draw).
    """

    tokens: int
    rows: int
    max_q_len: int
    max_kv_len: int
    mode: str


def likely_shapes(max_rows: int, max_tokens: int, max_model_len: int) -> Iterator[Shape]:
    """Shapes that a server is likely to need, those first that most of its steps have: decode steps, then steps with prompt chunks."""
    decode_kv, mixed_kv = (bucket(1, b, max_model_len) for b in (KV_BUCKETS, MIXED_KV_BUCKETS))
    for mode in ("greedy", "filtered", "draw"):
        sizes = sorted({bucket(rows, ROW_BUCKETS, max_rows) for rows in ROW_BUCKETS})
        yield from (Shape(rows, rows, 1, decode_kv, mode) for rows in sizes)
        most = 0
        for rows in sorted({bucket(rows, MIXED_ROW_BUCKETS, max_rows) for rows in MIXED_ROW_BUCKETS}):
            for tokens in sorted({bucket(n, TOKEN_BUCKETS, max_tokens) for n in TOKEN_BUCKETS}):
                if tokens > most:  # so many rows may have a token each
                    yield Shape(tokens, rows, tokens, mixed_kv, mode)
            most = rows


class StepBuffer:
    """Inputs of one step in one int32 buffer: pinned on the host (two, used in turn, for a copy may still be under way when the next step is
    written), one on the device. The fields of a shape lie one behind the other, so that one copy sends them."""

    def __init__(
        self, max_tokens: int, max_rows: int, page_tokens: int, max_pages: int, device: torch.device
    ) -> None:
        self.max_rows, self.page_tokens, self.max_pages = max_rows, page_tokens, max_pages
        per_row = len(_ROW_INTS) + len(_ROW_FLOATS) + 1
        n_fields = len(_TOKEN_INTS) + per_row
        size = max_tokens * len(_TOKEN_INTS) + max_rows * (per_row + max_pages) + 1 + n_fields * ALIGNMENT
        pinned = device.type == "cuda"
        self._host = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._turn = 0

    def _fields(self, shape: Shape) -> tuple[list[tuple[str, int, int]], int]:
        """(name, begin, length) of the fields of ``shape`` but the page table, and where that begins."""
        names = [(n, shape.tokens) for n in _TOKEN_INTS] + [(n, shape.rows) for n in _ROW_INTS + _ROW_FLOATS]
        at, out = 0, []
        for name, length in (*names, ("row_start", shape.rows + 1)):
            out.append((name, at, length))
            at += -(-length // ALIGNMENT) * ALIGNMENT
        return out, at

    def _width(self, shape: Shape) -> int:
        return min(self.max_pages, -(-shape.max_kv_len // self.page_tokens))

    def host(self, shape: Shape) -> dict[str, np.ndarray]:
        """Arrays to fill for a step of ``shape``; valid until the next but one call."""
        self._turn ^= 1
        flat = self._host[self._turn].numpy()
        fields, end = self._fields(shape)
        arrays = {name: flat[at : at + n] for name, at, n in fields}
        for name in _ROW_FLOATS:
            arrays[name] = arrays[name].view(np.float32)
        width = self._width(shape)
        arrays["page_table"] = flat[end : end + shape.rows * width].reshape(shape.rows, width)
        return arrays

    def send(self, shape: Shape) -> None:
        """Copy what was filled to the device; returns before the copy is done."""
        n = self._fields(shape)[1] + shape.rows * self._width(shape)
        self._device[:n].copy_(self._host[self._turn][:n], non_blocking=True)

    def device(self, shape: Shape) -> dict[str, Tensor]:
        """The same fields as views of the device buffer."""
        fields, end = self._fields(shape)
        tensors = {name: self._device[at : at + n] for name, at, n in fields}
        for name in _ROW_FLOATS:
            tensors[name] = tensors[name].view(torch.float32)
        width = self._width(shape)
        tensors["page_table"] = self._device[end : end + shape.rows * width].view(shape.rows, width)
        return tensors


@dataclass(frozen=True, slots=True)
class Slots:
    """Where sampled ids are kept on the device: of each token's session [T] (for ids not known yet), of each row's [B] (to write)."""

    of_token: Tensor
    of_row: Tensor


Step = Callable[[StepBatch, Slots, Draws | None, bool], Tensor]
"""(batch, slots, draws, filtered) -> the sampled ids [rows] int32, computed and stored; launches work on the current stream only."""


class StepGraphs:
    """Runs steps whose inputs are in ``buffer``."""

    def __init__(self, buffer: StepBuffer, step: Step, capture: bool) -> None:
        self.buffer, self.step, self.capture = buffer, step, capture
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
        if shape.max_q_len == 1 or shape.tokens <= TOKEN_BUCKETS[-1]:
            self._met.add(shape)
        return self.compute(shape)

    def compute(self, shape: Shape) -> Tensor:
        """:meth:`run` kernel by kernel."""
        f = self.buffer.device(shape)
        batch = StepBatch(
            token_ids=f["token_ids"],
            positions=f["positions"],
            row_start=f["row_start"],
            kv_len=f["kv_len"],
            page_table=f["page_table"],
            slots=f["slots"],
            logits_at=f["logits_at"] if shape.max_q_len > 1 else None,
            page_tokens=self.buffer.page_tokens,
            max_kv_len=shape.max_kv_len,
            max_q_len=shape.max_q_len,
        )
        draws = None
        if shape.mode != "greedy":
            draws = Draws(f["temperature"], f["top_k"], f["top_p"], f["min_p"], f["u"])
        return self.step(batch, Slots(f["token_slot"], f["row_slot"]), draws, shape.mode == "filtered")

    def capture_next(self, shapes: Iterable[Shape], fill: Callable[[Shape], None]) -> bool:
        """Run and capture the first of ``shapes`` that is not captured yet, on inputs that ``fill`` writes and sends; False when there is
        none, or no memory for it. Nothing may be in flight."""
        shape = next((s for s in shapes if s not in self.captured), None) if self.capture else None
        if shape is None:
            return False
        fill(shape)
        self.compute(shape)  # compiles what the capture then launches
        self._capture(shape)
        return True

    def close(self) -> None:
        """Give back the graphs and their memory."""
        self.captured.clear()

    def _capture(self, shape: Shape) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """Capture on a stream of its own; the buffers hold a step's inputs, which the capture does not touch. None when graphs have all
        the memory they may have, or the device has no more: from then on, what is not captured is launched kernel by kernel.

        TRAP: a graph that the garbage collector frees during a capture breaks that capture, so the collector waits.
        """
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                out = self.compute(shape)
        except torch.cuda.OutOfMemoryError:
            self.capture = False
        finally:
            if collecting:
                gc.enable()
        # the caching allocator may give memory back meanwhile: then the graph is said to cost nothing, not less
        self.n_bytes += max(0, torch.cuda.memory_reserved() - before)
        if self.capture:
            self.captured[shape] = (graph, out)
            self.capture = self.n_bytes < MOST_GRAPH_BYTES
        if not self.capture:
            event(_log, "no_more_graphs", n=len(self.captured), bytes=self.n_bytes)
        return self.captured.get(shape)


def bucket(value: int, buckets: tuple[int, ...], limit: int) -> int:
    """The smallest bucket that holds ``value``, at most ``limit``."""
    return min(next((b for b in buckets if b >= value), limit), limit)
