"""The door: checks a record and makes the sessions of its samples."""

from array import array
from dataclasses import dataclass

from msgspec.structs import replace

from kilat.base.errors import LimitError, RequestError
from kilat.base.hashing import branch_seed, root_hash
from kilat.base.ids import branch_id
from kilat.policy.sched.config import SchedulerConfig
from kilat.policy.sched.fairness import Tenant
from kilat.policy.sched.session import Session, State
from kilat.wire.session import SessionRecord


def check_record(record: SessionRecord, config: SchedulerConfig) -> None:
    """Raise RequestError or LimitError for a record that can never be served. Ranges of sampling parameters were checked before."""
    p = record.params
    if p.seed is None:
        raise RequestError("the session has no seed; whoever submits it must draw one", param="seed")
    if not 0 <= record.branch < p.n:
        raise RequestError(f"sample {record.branch} of n = {p.n}", param="n")
    if not record.prompt_ids:
        raise RequestError("the prompt has 0 tokens, at least 1 is needed", param="prompt")
    _check_ids("prompt", record.prompt_ids)
    _check_ids("output so far", record.output_ids)
    n_output = len(record.output_ids)
    if p.max_tokens is not None and n_output >= p.max_tokens:
        raise RequestError(
            f"{n_output:,} output tokens are there already, max_tokens is {p.max_tokens:,}",
            param="max_tokens",
        )
    n_tokens, limit = len(record.prompt_ids) + n_output, config.max_session_tokens - 1
    if n_tokens > limit:
        what = "the prompt has" if not n_output else "prompt and output so far have"
        fix = "a larger --max-model-len" if limit + 1 == config.max_model_len else "more memory for KV pages"
        raise LimitError(
            f"{what} {n_tokens:,} tokens, limit {limit:,}: shorten it or start with {fix}", param="prompt"
        )


def _check_ids(what: str, ids: list[int]) -> None:
    """Only 32-bit ids can be hashed. Which of them the model knows is for the owner of the vocabulary to check."""
    try:
        array("i", ids)
    except (TypeError, OverflowError) as e:
        raise RequestError(f"the {what} has a token id that is no 32-bit integer", param="prompt") from e


@dataclass(frozen=True, slots=True)
class Door:
    """Makes sessions. ``eos_ids`` end every session that does not ignore them."""

    config: SchedulerConfig
    model_id: str
    eos_ids: frozenset[int]

    def open(
        self, record: SessionRecord, tenant: Tenant, number: int, *, hand_over: bool = False
    ) -> list[Session]:
        """The sessions of a checked record, sample 0 first; ``number`` is that of the first and orders equal arrivals.

        A fresh request with n > 1 gives n sessions, all but the first HELD; so does sample 0 that arrives with the samples it held
        elsewhere. Any other record with output, or of sample k > 0, is that one sample and nothing else.
        """
        first = self._session(record, tenant, number)
        first.hand_over = hand_over
        fresh = replace(record, output_ids=[], page_hashes=[], with_samples=False)
        for k in range(1, record.n_sessions):
            sample = self._session(
                replace(fresh, session_id=branch_id(record.session_id, k), branch=k), tenant, number + k
            )
            sample.hand_over = hand_over
            sample.state, sample.parent, sample.front = State.HELD, first, True
            first.held.append(sample)
        return [first, *first.held]

    def _session(self, record: SessionRecord, tenant: Tenant, number: int) -> Session:
        p = record.params
        n_prompt = len(record.prompt_ids)
        n_end = self.config.max_session_tokens
        if p.max_tokens is not None:
            n_end = min(n_end, n_prompt + p.max_tokens)
        stop_ids = frozenset() if p.ignore_eos else self.eos_ids
        if p.stop_token_ids:
            stop_ids = stop_ids.union(p.stop_token_ids)
        wants_prompt_logprobs = p.prompt_logprobs is not None and record.branch == 0 and not record.output_ids
        return Session(
            id=record.session_id,
            record=record,
            tenant=tenant,
            seed=branch_seed(p.seed or 0, record.branch),
            root=root_hash(self.model_id, record.salt),
            tokens=record.prompt_ids + record.output_ids,
            n_min=n_prompt + p.min_tokens,
            n_end=n_end,
            stop_ids=stop_ids,
            rank=(-record.priority, record.arrival_s, number),
            seq=len(record.output_ids),
            front=bool(record.output_ids),
            prompt_logprobs=[None] if wants_prompt_logprobs else None,
        )
