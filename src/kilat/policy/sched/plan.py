"""What a scheduler hands to a runner for one step, and what it gets back. Plain data; both sides of a step see only this."""

from dataclasses import dataclass, field

from kilat.wire.messages import TokenLogprob
from kilat.wire.sampling import SamplingParams

PENDING = -1
"""Token id of a decode row whose input is still being computed by the step before: the runner puts the id it sampled there.

When that row failed or was stopped without a token, there is none; then any valid id will do, because the result will be dropped."""


@dataclass(frozen=True, slots=True)
class Row:
    """One session's share of a step: compute ``token_ids`` at positions ``start ...``, attending to all before them.

    ``token_ids`` has n = 1 (decode), n > 1 (a prefill chunk) or n = 1 + k (speculative) entries; the last may be :data:`PENDING`.
    ``pages`` is the session's page table, long enough for ``start + n`` tokens; it is append-only and must not be changed by the
    runner. ``sample`` says that the last position produces a token of the output: output position ``start + n``.
    ``prompt_logprobs``: report the log-probability of each prompt token that this row's positions predict.
    """

    session_id: str
    start: int
    token_ids: list[int]
    pages: list[int]
    sample: bool
    prompt_logprobs: bool = False

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A session whose first row since it was (re)admitted is in this plan. The runner builds its sampler state from this.

    ``token_ids`` is prompt + output so far, ``n_prompt`` the length of the prompt. ``seed`` is the sample's own (branch) seed.
    """

    session_id: str
    token_ids: list[int]
    n_prompt: int
    params: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything of one step.

    Order of execution: forget ``gone`` (session ids), build state for ``admitted``, copy pages ``copies`` (source, destination),
    then one forward pass over ``rows``. ``step`` grows by one per plan.
    """

    step: int
    rows: list[Row]
    admitted: list[Admitted] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return sum(len(r.token_ids) for r in self.rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of one step; every index is a row's index in ``plan.rows``.

    ``token_ids[i]`` are the accepted output ids of row ``i`` (empty when it does not sample; more than one with speculation).
    ``logprobs[i]`` goes with them when the session asked. ``prompt_logprobs[i]`` covers the prompt tokens at positions
    ``start + 1 ... min(start + n, n_prompt - 1)``. ``stopped`` rows are ended by a grammar that allows nothing more. ``failed[i]`` is the reason that
    row failed alone (bad grammar state, non-finite logits); the other rows are good.
    """

    token_ids: list[list[int]]
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    stopped: frozenset[int] = frozenset()
    failed: dict[int, str] = field(default_factory=dict)
