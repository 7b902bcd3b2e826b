"""The runner of a device that computes while the host plans: nothing here waits for the device but :meth:`Landing.result`.

Every running session owns a slot; the id it sampled last stays in ``last_ids[slot]`` on the device, where the next step reads it. Rows
whose sampling needs the host (penalties, biases, grammars, log-probabilities) take the slow way: their step is waited for.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kilat.engine.compile_ahead import CompileAhead
from kilat.engine.graphs import (
    KV_BUCKETS,
    MIXED_KV_BUCKETS,
    MIXED_ROW_BUCKETS,
    ROW_BUCKETS,
    TOKEN_BUCKETS,
    Shape,
    Slots,
    StepBuffer,
    StepGraphs,
    bucket,
    likely_shapes,
)
from kilat.engine.inputs import host_batch
from kilat.engine.runner import Flying, MatcherOf, Model, copy_pages
from kilat.engine.sampler import Sampler
from kilat.engine.timeline import INPUTS, LAUNCH, SAMPLING, Unwatched, Watcher
from kilat.ops.batch import StepBatch
from kilat.ops.sample import Draws, uniforms
from kilat.policy.sched.plan import PENDING, Row, StepPlan, StepResult

NOT_FINITE = "the model's output is not finite (NaN or infinity); its weights or dtype may be at fault"


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Sizes the runner's buffers are made for. ``scratch_page`` is a page of the pool that no session ever owns: rows that only fill
    up a bucket write there."""

    page_tokens: int
    max_rows: int
    max_tokens: int
    max_model_len: int
    scratch_page: int


class Landing:
    """A step on its way whose ids come back in a pinned buffer."""

    def __init__(self, rows: list[Row], ids: Tensor, done: "torch.cuda.Event | None") -> None:
        self._rows, self._ids, self._done = rows, ids, done

    def result(self) -> StepResult:
        if self._done is not None:
            self._done.synchronize()
        drawn = self._ids.tolist()
        token_ids: list[list[int]] = []
        failed = {}
        for i, row in enumerate(self._rows):
            token = drawn[i] if row.sample else None
            if token is not None and token < 0:
                failed[i] = NOT_FINITE
            token_ids.append([] if token is None or token < 0 else [token])
        return StepResult(token_ids, failed=failed)


class Landed:
    """A step whose result is known already."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class DeviceRunner:
    """Owns the page pool, the slots and the graphs. ``kv`` has one page more than the scheduler knows, the scratch page.

    ``model_s`` counts the host's time in launches; the device's own time is not waited for.
    """

    def __init__(
        self,
        model: Model,
        kv: Tensor,
        limits: DeviceLimits,
        sampler: Sampler,
        matcher_of: MatcherOf | None,
        ahead: CompileAhead | None = None,
    ) -> None:
        self.model, self.kv, self.limits, self.ahead = model, kv, limits, ahead
        self.sampler, self.matcher_of = sampler, matcher_of
        self._draw = sampler.kernels.draw
        self.model_s = 0.0
        self.run_s = 0.0
        self.watcher: Watcher = Unwatched()
        cuda = kv.device.type == "cuda"
        # a finished session's row may still be in flight when its successor starts: twice the rows are always enough
        n_slots = 2 * limits.max_rows
        self.last_ids = torch.zeros(n_slots + 1, dtype=torch.int32, device=kv.device)
        self._free = list(range(n_slots))
        self._no_slot = n_slots
        self._slots: dict[str, int] = {}
        max_pages = -(-limits.max_model_len // limits.page_tokens)
        self._buffer = StepBuffer(
            max(limits.max_tokens, limits.max_rows), limits.max_rows, limits.page_tokens, max_pages, kv.device
        )
        self.graphs = StepGraphs(self._buffer, self._step, capture=cuda)
        self._out = [torch.zeros(limits.max_rows, dtype=torch.int32, pin_memory=cuda) for _ in range(2)]
        self._turn = 0

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Flying:
        begin = time.perf_counter()
        self.watcher.mark(INPUTS)
        for session_id in plan.gone:
            self.sampler.forget(session_id)
            slot = self._slots.pop(session_id, None)
            if slot is not None:
                self._free.append(slot)
        self.sampler.admit_all(plan.admitted, self.matcher_of)
        for admitted in plan.admitted:
            if admitted.session_id not in self._slots:
                self._slots[admitted.session_id] = self._free.pop()
        if plan.copies:
            copy_pages(self.kv, plan.copies)
        if not all(self.sampler.is_easy(row) for row in plan.rows):
            flying = self._launch_waited(plan.rows)
        elif all(row.n_tokens == 1 for row in plan.rows):
            flying = self._launch_decode(plan.rows)
        else:
            flying = self._launch_mixed(plan.rows)
        self.run_s += time.perf_counter() - begin
        if self.ahead is not None:
            self.ahead.start()
        return flying

    def prepare(self) -> bool:
        """Measure one more product, or capture one more shape that steps are likely to have (tens or hundreds of milliseconds); False when
        there is nothing to do, because all is done or because kernels are still being compiled. To be called while no step is in flight."""
        if self.ahead is not None:
            self.ahead.start()
            if not self.ahead.done:
                return False
        limits, measure = self.limits, self.sampler.kernels.measure_next
        shapes = likely_shapes(limits.max_rows, limits.max_tokens, limits.max_model_len)
        most_rows = max(limits.max_rows, min(limits.max_tokens, TOKEN_BUCKETS[-1]))
        with torch.inference_mode():
            # first, for a graph keeps what it was captured with
            if measure is not None and measure(most_rows):
                return True
            return self.graphs.capture_next(shapes, self._send_scratch)

    @torch.inference_mode()
    def compute(self, shape: Shape) -> None:
        """Launch the kernels of a step of ``shape`` that touches no session."""
        self._send_scratch(shape)
        self.graphs.compute(shape)

    def _send_scratch(self, shape: Shape) -> None:
        """Inputs of a step that touches no session: all its tokens go to the scratch page."""
        f = self._buffer.host(shape)
        if shape.max_q_len == 1:
            f["row_start"][:] = np.arange(shape.rows + 1)
            f["kv_len"][:] = 1
        else:
            n = min(shape.tokens, shape.max_kv_len)
            f["row_start"][:] = n
            f["kv_len"][:] = 0
            f["row_start"][0], f["kv_len"][0] = 0, n
        f["logits_at"][:] = 0
        f["page_table"][:] = self.limits.scratch_page
        self._fill_rest([], shape, f)
        self._buffer.send(shape)

    def close(self) -> None:
        if self.ahead is not None:
            self.ahead.close()
        if self.kv.device.type == "cuda":
            torch.cuda.synchronize()
        self.graphs.close()

    # -- steps whose ids stay on the device -----------------------------------------------------------------------------------------

    def _launch_decode(self, rows: list[Row]) -> Flying:
        """Every row has one token."""
        n, limits = len(rows), self.limits
        size = bucket(n, ROW_BUCKETS, limits.max_rows)
        start = np.fromiter((r.start for r in rows), np.int32, n)
        kv_bound = bucket(int(start.max()) + 1, KV_BUCKETS, limits.max_model_len)
        shape = Shape(size, size, 1, kv_bound, self._mode(rows))
        f = self._buffer.host(shape)
        f["token_ids"][:n] = [r.token_ids[0] for r in rows]
        f["positions"][:n] = start
        f["kv_len"][:n] = start + 1
        f["token_slot"][:n] = [self._slots[r.session_id] for r in rows]
        table = f["page_table"]
        width = table.shape[1]
        for i, r in enumerate(rows):
            table[i, : len(r.pages)] = r.pages[:width]
        f["slots"][:n] = (
            table[np.arange(n), start // limits.page_tokens] * limits.page_tokens + start % limits.page_tokens
        )
        f["row_start"][:] = np.arange(size + 1)
        # rows that only fill up the bucket decode a token into the scratch page
        f["kv_len"][n:] = 1
        table[n:, 0] = limits.scratch_page
        return self._launch(rows, shape, f)

    def _launch_mixed(self, rows: list[Row]) -> Flying:
        """Rows of any lengths; in a step that is worth a graph the shape is filled up with rows of no tokens and tokens of no row."""
        host = host_batch(rows, self.limits.page_tokens)
        n_rows, n_tokens = len(rows), len(host.token_ids)
        tokens, size = n_tokens, n_rows
        if n_tokens <= TOKEN_BUCKETS[-1]:
            tokens = bucket(n_tokens, TOKEN_BUCKETS, self.limits.max_tokens)
            size = bucket(n_rows, MIXED_ROW_BUCKETS, self.limits.max_rows)
        kv_bound = bucket(host.max_kv_len, MIXED_KV_BUCKETS, self.limits.max_model_len)
        shape = Shape(tokens, size, tokens, kv_bound, self._mode(rows))
        f = self._buffer.host(shape)
        f["token_ids"][:n_tokens] = host.token_ids
        f["positions"][:n_tokens] = host.positions
        f["slots"][:n_tokens] = host.slots
        f["token_slot"][:] = self._no_slot
        for i in np.flatnonzero(host.token_ids == PENDING):
            row = rows[int(np.searchsorted(host.row_start, i, side="right")) - 1]
            f["token_slot"][i] = self._slots[row.session_id]
        f["row_start"][: n_rows + 1] = host.row_start
        f["row_start"][n_rows + 1 :] = n_tokens
        f["kv_len"][:n_rows] = host.kv_len
        f["kv_len"][n_rows:] = 0
        width = min(host.page_table.shape[1], f["page_table"].shape[1])
        f["page_table"][:n_rows, :width] = host.page_table[:, :width]
        f["logits_at"][:n_rows] = host.row_start[1:] - 1
        f["logits_at"][n_rows:] = 0
        return self._launch(rows, shape, f)

    def _launch(self, rows: list[Row], shape: Shape, f: dict[str, np.ndarray]) -> Flying:
        self._fill_rest(rows, shape, f)
        self._buffer.send(shape)
        begin = time.perf_counter()
        self.watcher.mark(LAUNCH)
        ids = self.graphs.run(shape)
        self.model_s += time.perf_counter() - begin
        return self._land(rows, ids[: len(rows)])

    def _fill_rest(self, rows: list[Row], shape: Shape, f: dict[str, np.ndarray]) -> None:
        """What all shapes have in common: where ids are kept, how they are drawn, and tokens that only fill up."""
        n_rows, n_tokens = len(rows), sum(len(r.token_ids) for r in rows)
        f["token_ids"][n_tokens:] = f["positions"][n_tokens:] = 0
        f["slots"][n_tokens:] = self.limits.scratch_page * self.limits.page_tokens
        f["token_slot"][n_tokens:] = self._no_slot
        f["row_slot"][:n_rows] = [self._slots[r.session_id] if r.sample else self._no_slot for r in rows]
        f["row_slot"][n_rows:] = self._no_slot
        if shape.mode != "greedy":
            self._fill_draws(rows, f)

    def _step(self, batch: StepBatch, slots: Slots, draws: Draws | None, filtered: bool) -> Tensor:
        """The step that graphs hold: put in the pending ids, run the model, draw, keep the ids for the next step."""
        ids = torch.where(
            batch.token_ids == PENDING, self.last_ids.index_select(0, slots.of_token), batch.token_ids
        )
        drawn = self._draw(self.model(_with_ids(batch, ids), self.kv), draws, filtered=filtered)
        self.last_ids[slots.of_row] = drawn
        return drawn

    # -- steps with rows that need the host -------------------------------------------------------------------------------------------

    def _launch_waited(self, rows: list[Row]) -> Flying:
        host = host_batch(rows, self.limits.page_tokens)
        device = self.kv.device
        batch = host.to(device, self.limits.page_tokens)
        ids = self._with_pending(rows, host.token_ids, host.row_start, batch.token_ids)
        begin = time.perf_counter()
        self.watcher.mark(LAUNCH)
        logits = self.model(_with_ids(batch, ids), self.kv)
        self.watcher.mark(SAMPLING)
        self.model_s += time.perf_counter() - begin
        slots = [self._slots[r.session_id] for r in rows if r.sample]
        result = self.sampler.sample(rows, logits)
        known = [t[-1] if t else 0 for t, r in zip(result.token_ids, rows) if r.sample]
        at = torch.tensor(slots, dtype=torch.int32, device=device)
        self.last_ids[at] = torch.tensor(known, dtype=torch.int32, device=device)
        return Landed(result)

    def _with_pending(
        self, rows: list[Row], token_ids: np.ndarray, row_start: np.ndarray, ids: Tensor
    ) -> Tensor:
        at = np.flatnonzero(token_ids == PENDING)
        if not len(at):
            return ids
        owner = np.searchsorted(row_start, at, side="right") - 1
        slots = torch.tensor([self._slots[rows[i].session_id] for i in owner], device=ids.device)
        ids[torch.from_numpy(at).to(ids.device)] = self.last_ids[slots]
        return ids

    # -- both -----------------------------------------------------------------------------------------------------------------------

    def _mode(self, rows: Sequence[Row]) -> str:
        """See Shape."""
        params = [self.sampler.states[r.session_id].params for r in rows if r.sample]
        if not any(p.temperature for p in params):
            return "greedy"
        return "filtered" if any(p.top_k or p.top_p < 1 or p.min_p for p in params) else "draw"

    def _fill_draws(self, rows: Sequence[Row], fields: dict[str, np.ndarray]) -> None:
        """Write the sampling parameters of ``rows`` into ``fields``; rows past them are greedy."""
        n = len(rows)
        params = [self.sampler.states[r.session_id].params for r in rows]
        for name in ("temperature", "top_k", "top_p", "min_p"):
            fields[name][:n] = [getattr(p, name) for p in params]
        seeds = np.array([self.sampler.states[r.session_id].seed for r in rows], np.int64)
        fields["u"][:n] = uniforms(seeds, np.array([r.start + r.n_tokens for r in rows], np.int64))
        for name, off in (("temperature", 0.0), ("top_p", 1.0), ("min_p", 0.0), ("top_k", 0)):
            fields[name][n:] = off

    def _land(self, rows: list[Row], ids: Tensor) -> Landing:
        """Start the copy of the rows' ids [B] to the host."""
        self._turn ^= 1
        out = self._out[self._turn][: len(ids)]
        out.copy_(ids, non_blocking=True)
        done = None
        if ids.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return Landing(rows, out, done)


def _with_ids(batch: StepBatch, token_ids: Tensor) -> StepBatch:
    """``batch`` with other token ids."""
    return StepBatch(
        token_ids,
        batch.positions,
        batch.row_start,
        batch.kv_len,
        batch.page_table,
        batch.slots,
        batch.logits_at,
        batch.page_tokens,
        batch.max_kv_len,
        batch.max_q_len,
    )
