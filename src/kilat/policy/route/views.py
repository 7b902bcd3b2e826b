"""What goes into a choice of workers and what comes out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as the gateway knows it at this moment.

    ``prefill_weight`` and ``decode_weight`` are its shares of the two kinds of work, 0 or more; with 0 it does that work only when
    nobody else can, or when it is cheaper than moving it. ``running`` and ``waiting`` are sessions, ``queued_prompt_tokens`` prompt
    tokens it has been given and has not computed; all three include what was sent to it since its last status (see ``Loads``).
    ``free_pages`` counts pages that a new session can take: free and cached ones. ``prefill_tokens_per_s``, ``step_s`` (a step
    that only decodes its running sessions) and ``row_s`` (what one more adds to it) are measured; 0 means not known. ``seen_s`` is when it was last heard of, on the clock of ``now_s``.
    ``max_running``: sessions it runs at once, 0 for not known.
    """

    worker_id: str
    prefill_weight: float = 1.0
    decode_weight: float = 1.0
    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    n_pages: int = 0
    queued_prompt_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    row_s: float = 0.0
    draining: bool = False
    seen_s: float = 0.0
    max_running: int = 0


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request that needs workers: ``names`` are those of the full pages of its first ``n_prompt - 1`` tokens (the last token is always
    computed), with its tenant's salt in them. ``salt`` is only shown in the explanation. ``n_answer``: tokens it will write at most, None for
    not known."""

    session_id: str
    n_prompt: int
    names: Sequence[bytes]
    page_tokens: int
    salt: str = ""
    n_answer: int | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """A choice: ``worker`` computes the prompt, ``decode`` goes on with it (None: the same), ``lend_from`` has pages of the prompt that
    ``worker`` should read first, ``n_lent`` pages of the chain from its start. ``why`` explains it in plain JSON values."""

    worker: str
    decode: str | None = None
    lend_from: str | None = None
    n_lent: int = 0
    why: dict[str, Any] = field(default_factory=dict)
