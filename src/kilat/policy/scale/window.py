"""What was measured since the last decision."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RoleWorker:
    """A worker that lives: its weights, the prompt tokens in its queue, its prefill rate (0: not known), sessions it has and can run at
    once (0: not known)."""

    worker_id: str
    prefill_weight: float
    decode_weight: float
    queued_prompt_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    running: int = 0
    max_running: int = 0
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Window:
    """``ttft_s`` of the requests whose first token came in this window, ``tpot_s`` (seconds per output token) of the streams that had
    tokens in it; either may be empty."""

    workers: Sequence[RoleWorker]
    ttft_s: Sequence[float] = field(default_factory=tuple)
    tpot_s: Sequence[float] = field(default_factory=tuple)
