"""The runner executes one StepPlan: page copies, input tensors, the forward pass, the sampler. It decides nothing."""

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kilat.engine.grammar import Matcher
from kilat.engine.inputs import build_batch
from kilat.engine.sampler import Sampler
from kilat.ops.batch import StepBatch
from kilat.policy.sched.plan import StepPlan, StepResult
from kilat.wire.sampling import Grammar


class Model(Protocol):
    """What the runner needs of a model: logits [S, V] of the tokens at ``batch.logits_at``; K and V go into ``kv``."""

    def __call__(self, batch: StepBatch, kv: Tensor) -> Tensor: ...


class Runner:
    """Owns the page pool and the sampler states; one thread at a time runs it.

    ``matcher_of`` gives a matcher at the start of a grammar that was compiled before its session was scheduled. ``model_s`` and ``run_s`` are seconds spent in the forward pass
    and in whole steps since the start; their difference is the host's share.
    """

    def __init__(
        self,
        model: Model,
        kv: Tensor,
        page_tokens: int,
        sampler: Sampler,
        matcher_of: Callable[[Grammar], Matcher] | None,
    ) -> None:
        self.model, self.kv, self.page_tokens = model, kv, page_tokens
        self.sampler, self.matcher_of = sampler, matcher_of
        self.last_sampled: dict[str, int] = {}
        self.model_s = 0.0
        self.run_s = 0.0

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Execute ``plan``; plans must come in the order of their steps."""
        begin = time.perf_counter()
        for session_id in plan.gone:
            self.sampler.forget(session_id)
            self.last_sampled.pop(session_id, None)
        for admitted in plan.admitted:
            grammar = admitted.params.grammar
            self.sampler.admit(admitted, self.matcher_of(grammar) if grammar and self.matcher_of else None)
        if plan.copies:
            source, destination = (torch.tensor(side) for side in zip(*plan.copies))
            self.kv[destination] = self.kv[source]
        batch = build_batch(plan.rows, self.page_tokens, self.kv.device, self.last_sampled)
        start = time.perf_counter()
        logits = self.model(batch, self.kv)
        self.model_s += time.perf_counter() - start
        result = self.sampler.sample(plan.rows, logits)
        for row, ids in zip(plan.rows, result.token_ids):
            if ids:
                self.last_sampled[row.session_id] = ids[-1]
        self.run_s += time.perf_counter() - begin
        return result
