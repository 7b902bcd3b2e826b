"""A model without math: the next token is a hash of all tokens before it, which it reads back from the pages it was given.

So a page that was moved wrongly, too late, or given to two sessions shows as a wrong token. A step takes the time that ``StepCost`` says.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from kilat.base.errors import EngineError
from kilat.base.hashing import branch_seed
from kilat.policy.sched.plan import PENDING, Admitted, Row, StepPlan, StepResult
from kilat.wire.session import SessionRecord

VOCAB = 97
EOS = 96
_EMPTY = -1


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: a start, each token of a prompt chunk, each row that decodes, and each token of context that it reads."""

    base_s: float = 0.010
    prompt_token_s: float = 0.0005
    row_s: float = 0.0005
    context_token_s: float = 0.0

    def seconds(self, plan: StepPlan) -> float:
        total = self.base_s
        for row in plan.rows:
            if row.n_tokens > 1:
                total += row.n_tokens * self.prompt_token_s
            else:
                total += self.row_s + row.start * self.context_token_s
        return total


def next_token(tokens: Sequence[int], seed: int) -> int:
    """What the model says after ``tokens``."""
    return crc32(array("i", tokens).tobytes(), seed & 0xFFFFFFFF) % VOCAB


def expected(record: SessionRecord, branch: int, limit: int) -> list[int]:
    """Output of sample ``branch`` of a request that nothing disturbs; ``limit``: tokens a session can have."""
    p = record.params
    seed = branch_seed(p.seed or 0, branch)
    tokens = list(record.prompt_ids)
    n_end = min(limit, len(tokens) + (p.max_tokens or limit))
    while len(tokens) < n_end:
        token = next_token(tokens, seed)
        if token == EOS and not p.ignore_eos and len(tokens) - len(record.prompt_ids) >= p.min_tokens:
            break
        tokens.append(token)
    return tokens[len(record.prompt_ids) :]


class Runner:
    """Executes plans of one worker. With ``content`` pages hold tokens and are read; without, every token is the same, which is fast and
    enough to measure queues. Raises EngineError when a plan breaks what a runner may rely on."""

    def __init__(self, n_pages: int, page_tokens: int, *, content: bool = True) -> None:
        self.page_tokens = page_tokens
        self.pages = [[_EMPTY] * page_tokens for _ in range(n_pages)] if content else None
        self._states: dict[str, Admitted] = {}
        self._last: dict[str, int] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for session_id in plan.gone:
            self._states.pop(session_id, None)
            self._last.pop(session_id, None)
        for admitted in plan.admitted:
            self._states[admitted.session_id] = admitted
        pages = self.pages
        if pages is None:
            return StepResult([[1] if row.sample else [] for row in plan.rows])
        for source, destination in plan.copies:
            pages[destination] = list(pages[source])
        for row in plan.rows:
            self._write(pages, row)
        return StepResult([[self._sample(pages, row)] if row.sample else [] for row in plan.rows])

    def _write(self, pages: list[list[int]], row: Row) -> None:
        for position, token in enumerate(row.token_ids, row.start):
            value = self._last[row.session_id] if token == PENDING else token
            pages[row.pages[position // self.page_tokens]][position % self.page_tokens] = value

    def _sample(self, pages: list[list[int]], row: Row) -> int:
        n = row.start + row.n_tokens
        context: list[int] = []
        for page in row.pages[: -(-n // self.page_tokens)]:
            context += pages[page]
        del context[n:]
        if _EMPTY in context:
            raise EngineError(f"{row.session_id} attends to a token that was never written")
        token = next_token(context, self._states[row.session_id].seed)
        self._last[row.session_id] = token
        return token
