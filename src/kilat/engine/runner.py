"""The runner executes StepPlans: page copies, input tensors, the forward pass, the sampler. It decides nothing."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from kilat.engine.grammar import Matcher
from kilat.engine.inputs import build_batch
from kilat.engine.sampler import Sampler
from kilat.engine.timeline import INPUTS, MODEL, SAMPLING, Unwatched, Watcher
from kilat.ops.batch import StepBatch
from kilat.policy.sched.plan import StepPlan, StepResult
from kilat.wire.sampling import Grammar

MatcherOf = Callable[[Grammar], Matcher]
"""Gives a matcher at the start of a grammar that was compiled before its session was scheduled."""


class Model(Protocol):
    """What a runner needs of a model: logits [S, V] of the tokens at ``batch.logits_at``; K and V go into ``kv``."""

    def __call__(self, batch: StepBatch, kv: Tensor) -> Tensor: ...


class Flying(Protocol):
    """A step on its way."""

    def result(self) -> StepResult:
        """Wait for the step. Raises what the step raised."""
        ...


class Runner(Protocol):
    """Executes plans in the order they are launched. ``model_s`` and ``run_s`` are seconds spent in forward passes and in whole steps
    since the start; their difference is the host's share. ``watcher`` hears the phases of launches."""

    model_s: float
    run_s: float
    watcher: Watcher

    def launch(self, plan: StepPlan) -> Flying:
        """Start ``plan``; it may be finished when this returns."""
        ...

    def prepare(self) -> bool:
        """With nothing in flight: do some of the work that makes later steps faster; False when there is none."""
        ...

    def close(self) -> None: ...


class HostRunner:
    """The CPU's runner. Owns the page pool and the sampler states.

    With ``depth`` 1 a step is finished when :meth:`launch` returns; with 2 steps run in a thread of their own, one after another.
    """

    def __init__(
        self,
        model: Model,
        kv: Tensor,
        page_tokens: int,
        sampler: Sampler,
        matcher_of: MatcherOf | None,
        depth: int,
    ) -> None:
        self.model, self.kv, self.page_tokens = model, kv, page_tokens
        self.sampler, self.matcher_of = sampler, matcher_of
        self.model_s = 0.0
        self.run_s = 0.0
        self.watcher: Watcher = Unwatched()
        self._last_sampled: dict[str, int] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="step") if depth > 1 else None

    def launch(self, plan: StepPlan) -> Flying:
        if self._thread is not None:
            return self._thread.submit(self._run, plan)
        done: Future[StepResult] = Future()
        done.set_result(self._run(plan))
        return done

    def prepare(self) -> bool:
        return False

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepResult:
        begin = time.perf_counter()
        self.watcher.mark(INPUTS)
        for session_id in plan.gone:
            self.sampler.forget(session_id)
            self._last_sampled.pop(session_id, None)
        self.sampler.admit_all(plan.admitted, self.matcher_of)
        if plan.copies:
            copy_pages(self.kv, plan.copies)
        batch = build_batch(plan.rows, self.page_tokens, self.kv.device, self._last_sampled)
        start = time.perf_counter()
        self.watcher.mark(MODEL)
        logits = self.model(batch, self.kv)
        self.watcher.mark(SAMPLING)
        self.model_s += time.perf_counter() - start
        result = self.sampler.sample(plan.rows, logits)
        for row, ids in zip(plan.rows, result.token_ids):
            if ids:
                self._last_sampled[row.session_id] = ids[-1]
        self.run_s += time.perf_counter() - begin
        return result


def copy_pages(kv: Tensor, copies: list[tuple[int, int]]) -> None:
    """kv[destination] = kv[source] for (source, destination) of ``copies``."""
    source, destination = (torch.tensor(side, device=kv.device) for side in zip(*copies))
    kv[destination] = kv[source]
