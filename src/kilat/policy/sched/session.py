"""Session: one running sample and the numbers that say how far it is.

    HELD       sample k > 0 of a request, until sample 0 has computed the prompt
    WAITING    in the queue; without pages, or with pages that arrived from a peer (it is parked)
    RUNNING    has a page table, gets rows
    FROZEN     gets no rows any more, keeps its pages; a row that is still in flight counts when it comes back
    FINISHED   its last event is out, or it has left; a row that is still in flight is dropped when it comes back

    HELD -> WAITING <-> RUNNING, from WAITING and RUNNING to FROZEN, and from each of them to FINISHED. Only roster.py changes ``state``.

Positions of a session, each at most the next (the last two may differ by one token that is being sampled):

    n_computed   tokens whose KV is in its pages, as far as committed steps say
    n_planned    the same, once all outstanding plans have run: the start of its next row
    len(tokens)  tokens whose ids are known: prompt and output
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from kilat.policy.cache.table import PageTable, extend_chain
from kilat.policy.sched.fairness import Tenant
from kilat.wire.messages import TokenLogprob
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SessionRecord


class State(Enum):
    HELD = "held"
    WAITING = "waiting"
    RUNNING = "running"
    FROZEN = "frozen"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Session:
    """One sample of a request. Made by door.py, changed by roster.py (state, pages), draft.py (n_planned) and scheduler.py (the rest).

    ``n_min``, ``n_end``: a stop token counts from ``n_min`` tokens on, and with ``n_end`` tokens the session ends; both count the
    prompt. ``front``: goes before others of its priority, because its work was admitted once already. ``n_lost``: tokens whose KV a
    preemption dropped. ``hand_over``: it is frozen after its first token. ``n_hit``: prompt tokens found in the prefix cache on first admission. ``prompt_logprobs``: those gathered so
    far, None when none are wanted (any more). ``chain``: hashes of full pages of ``tokens``, below ``root``. ``parent``: the sample whose prompt pages this one can share; ``held``: samples that
    wait for this one's prompt. ``rank`` orders running sessions: the last one is preempted first.
    """

    id: str
    record: SessionRecord
    tenant: Tenant
    seed: int
    root: bytes
    tokens: list[int]
    n_min: int
    n_end: int
    stop_ids: frozenset[int]
    rank: tuple[int, float, int]
    seq: int
    state: State = State.WAITING
    table: PageTable | None = None
    chain: list[bytes] = field(default_factory=list)
    n_computed: int = 0
    n_planned: int = 0
    n_flight: int = 0
    front: bool = False
    n_lost: int = 0
    n_hit: int | None = None
    hand_over: bool = False
    has_spoken: bool = False
    prompt_logprobs: list[TokenLogprob | None] | None = None
    parent: "Session | None" = None
    held: list["Session"] = field(default_factory=list)

    @property
    def params(self) -> SamplingParams:
        return self.record.params

    @property
    def n_prompt(self) -> int:
        return len(self.record.prompt_ids)

    @property
    def can_run_ahead(self) -> bool:
        """Whether a row may be planned for a token that is still being sampled: not when that token is certainly the last one (here),
        nor with a grammar, whose state must see the token first."""
        return self.n_planned + 1 < self.n_end and self.record.params.grammar is None and not self.hand_over

    @property
    def is_computing_pages(self) -> bool:
        """Whether it has prompt tokens to compute that fill a page which others could then find."""
        return (
            self.table is not None
            and self.table.n_sealed < len(self.chain)
            and self.n_computed < len(self.tokens) - 1
        )

    @property
    def can_be_forked(self) -> bool:
        """Whether all prompt tokens but the last (which every sample computes itself) are in pages of this session."""
        return self.table is not None and self.n_computed >= self.n_prompt - 1

    def name_pages(self, n_pages: int, page_tokens: int) -> list[bytes]:
        """Content hashes of the first ``n_pages`` full pages of the known tokens, and perhaps of more."""
        extend_chain(self.chain, self.root, self.tokens, page_tokens, n_pages)
        return self.chain

    def take_output(self, ids: Iterable[int]) -> tuple[list[int], str | None, int | None]:
        """Append sampled ``ids`` in order until one ends the session; returns (appended ids, finish reason, id that stopped it).

        A stopping token is not appended, and what comes after the end is dropped.
        """
        taken: list[int] = []
        for token in ids:
            if token in self.stop_ids and len(self.tokens) >= self.n_min:
                return taken, "stop", token
            self.tokens.append(token)
            taken.append(token)
            if len(self.tokens) >= self.n_end:
                return taken, "length", None
        return taken, None, None
