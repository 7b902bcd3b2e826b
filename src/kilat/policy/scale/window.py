"""What was measured since the last decision."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RoleWorker:
    """A worker that lives: its weights, the prompt tokens in its queue, how fast it computes prompts alone, sessions it has and can run at
    once, seconds of a step that decodes those it has, what one more adds to it, and its pages that sessions use, or will use that are in its
    queue, of all it has. Rates, times and limits: 0 for not known."""

    worker_id: str
    prefill_weight: float
    decode_weight: float
    queued_prompt_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    running: int = 0
    max_running: int = 0
    draining: bool = False
    step_s: float = 0.0
    row_s: float = 0.0
    pages_used: int = 0
    n_pages: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """What came in ``seconds``: ``ttft_s`` of the requests whose first token came, ``tpot_s`` (seconds per output token, of this window's
    tokens alone) of the streams that had tokens, and ``prompts``: the tokens of each new request that have to be computed. All may be empty."""

    workers: Sequence[RoleWorker]
    seconds: float = 1.0
    prompts: Sequence[int] = field(default_factory=tuple)
    ttft_s: Sequence[float] = field(default_factory=tuple)
    tpot_s: Sequence[float] = field(default_factory=tuple)
