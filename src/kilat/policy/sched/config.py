"""Settings of a scheduler."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kilat.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and weights; sizes in tokens unless named. Raises ConfigError.

    n_pages, page_tokens  the page pool
    max_model_len         tokens of one session, prompt and output
    max_num_seqs          sessions running at once (never more than max_step_tokens: each needs a token of every step)
    max_step_tokens       tokens of one step over all rows
    max_waiting           sessions that may queue beyond those that can start at once
    prefix_cache          find the start of a prompt in pages that are still there
    depth                 plans that may be outstanding: 2 plans a step while the one before runs
    tenant_weights        share of a tenant in the prefill work when several wait; 1 for those not named
    target_step_s         while sessions decode, a step's prefill share is what this leaves; None: only max_step_tokens bounds it
    token_multiple        such a step's tokens are a multiple of this, for a device that is prepared for steps of some sizes
    """

    n_pages: int
    page_tokens: int
    max_model_len: int
    max_num_seqs: int
    max_step_tokens: int
    max_waiting: int = 1024
    prefix_cache: bool = True
    depth: int = 1
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    target_step_s: float | None = None
    token_multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("n_pages", "page_tokens", "max_num_seqs", "max_step_tokens", "token_multiple"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, allowed 1 or more")
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting is {self.max_waiting}, allowed 0 or more")
        if self.depth not in (1, 2):
            raise ConfigError(f"depth is {self.depth}, allowed 1 or 2")
        if self.max_session_tokens < 2:
            raise ConfigError(
                f"a session may have {self.max_session_tokens} tokens, at least 2 are needed: "
                "raise max_model_len or the memory for pages"
            )
        if self.target_step_s is not None and not self.target_step_s > 0:
            raise ConfigError(f"target_step_s is {self.target_step_s}, allowed above 0")
        for tenant, weight in self.tenant_weights.items():
            if not weight > 0:
                raise ConfigError(f"the weight of tenant {tenant!r} is {weight}, allowed above 0")

    @property
    def max_session_tokens(self) -> int:
        """The most tokens a session can have: what the model takes and what the whole pool holds."""
        return min(self.max_model_len, self.n_pages * self.page_tokens)

    @property
    def max_running(self) -> int:
        """The most sessions that run at once: one token of the step must be left for each."""
        return min(self.max_num_seqs, self.max_step_tokens)
