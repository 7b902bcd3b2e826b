"""The sessions behind one HTTP request, from submission to the last token, whatever form the answer has."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kilat.base.errors import EngineError, KilatError, LimitError
from kilat.base.ids import new_session_id
from kilat.cluster.gateway.errors import from_peer
from kilat.cluster.gateway.fleet import Fleet
from kilat.cluster.gateway.sample import Piece, Sample
from kilat.cluster.gateway.sessions import Inbox
from kilat.text.detokenize import StreamDetokenizer
from kilat.text.tokenizer import Tokenizer
from kilat.wire.messages import SessionEvent, TokenLogprob
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SessionRecord


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate: ``params.n`` samples of each prompt. Sample ``k`` of prompt ``p`` has the index ``p * n + k``.

    ``continues``: the output goes on in the prompt's text. Times are monotonic seconds.
    """

    prompts: list[list[int]]
    params: SamplingParams
    skip_special: bool
    continues: bool
    tenant: str
    salt: str
    priority: int
    arrival_s: float
    deadline_s: float


class Generation:
    """Runs a :class:`Job`. :meth:`close` must be called, whatever happened; it stops in the worker what still runs.

    Times are monotonic seconds: of the first and last token (None before), ``heard_at_s`` of the last sign of life from a worker,
    ``failed_at_s`` written by the sweep that first saw the inbox failed.
    """

    def __init__(
        self, fleet: Fleet, tokenizer: Tokenizer, job: Job, *, request_id: str, max_lag_tokens: int | None
    ) -> None:
        self.job = job
        self.inbox = Inbox(max_lag_tokens)
        self.request_id = request_id
        self.error_code: str | None = None
        self.cached_tokens = 0
        self.heard_at_s = job.arrival_s
        self.failed_at_s: float | None = None
        self.first_at_s: float | None = None
        self.last_at_s: float | None = None
        self.prompt_logprobs: list[list[TokenLogprob | None] | None] = [None] * len(job.prompts)
        self._fleet = fleet
        self._clock = time.monotonic
        p = job.params
        self.samples = [
            Sample(
                StreamDetokenizer(
                    tokenizer,
                    stop=p.stop,
                    include_stop=p.include_stop,
                    skip_special=job.skip_special,
                    min_tokens=p.min_tokens,
                    continues=job.continues,
                ),
                p,
            )
            for _ in range(len(job.prompts) * p.n)
        ]
        self.session_ids = [new_session_id() for _ in job.prompts]
        self._running = len(self.samples)

    def submit(self) -> None:
        """Hand all sessions to workers. Raises CapacityError or PeerError."""
        job = self.job
        for p, (session_id, prompt) in enumerate(zip(self.session_ids, job.prompts)):
            record = SessionRecord(
                session_id=session_id,
                prompt_ids=prompt,
                params=job.params,
                tenant=job.tenant,
                salt=job.salt,
                priority=job.priority,
                arrival_s=job.arrival_s,
            )
            self._fleet.submit(record, self.inbox, p * job.params.n)

    @property
    def done(self) -> bool:
        return self._running == 0

    async def next(self) -> list[tuple[int, Piece]]:
        """The news since the last call, one piece per sample; empty when there is nothing to say for a while, or nothing left.

        Raises a KilatError when the request failed as a whole: refused, its worker died, its reader is too slow, its time is over.
        """
        try:
            return await self._next()
        except KilatError as e:
            self.error_code = e.code
            raise

    async def _next(self) -> list[tuple[int, Piece]]:
        if self.done:
            return []
        pieces: dict[int, Piece] = {}
        items = await self.inbox.take()
        self.heard_at_s = self._clock()
        for index, event in items:
            if event.finish == "error":
                raise from_peer(
                    event.error_code or EngineError.code, event.error or "the engine failed on this request"
                )
            if event.finish == "abort":
                raise from_peer("overloaded", "the server stopped this request; send it again", status=503)
            piece = self._feed(index, event)
            before = pieces.get(index)
            pieces[index] = piece if before is None else before.joined(piece)
        return list(pieces.items())

    def _feed(self, index: int, event: SessionEvent) -> Piece:
        if event.token_ids:
            self.last_at_s = self.heard_at_s
            if self.first_at_s is None:
                self.first_at_s = self.last_at_s
        p, k = divmod(index, self.job.params.n)
        sample = self.samples[index]
        if k == 0 and not sample.output_ids:  # not again from a worker that goes on with it
            self.cached_tokens += event.cached_tokens
            if event.prompt_logprobs is not None:
                self.prompt_logprobs[p] = event.prompt_logprobs
        piece = sample.feed(event)
        if piece.finish is not None:
            self._running -= 1
            if sample.hit_stop_string:
                self._fleet.stop_sample(self.session_ids[p], k, self.job.params.n)
        return piece

    def fail(self, error: KilatError) -> None:
        """End the request from outside: deadline, disconnect, shutdown."""
        self.inbox.fail(error)

    def close(self) -> None:
        """Stop in the worker what still runs and forget all sessions. Idempotent."""
        self._fleet.release(self.session_ids, self.job.params.n)

    @property
    def arrival_s(self) -> float:
        return self.job.arrival_s

    @property
    def n_samples(self) -> int:
        return len(self.samples)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(p) for p in self.job.prompts)

    @property
    def output_tokens(self) -> int:
        return sum(len(s.output_ids) for s in self.samples)


def check_prompts(
    prompts: Sequence[Sequence[int]], *, max_model_len: int, vocab_size: int, param: str
) -> None:
    """Raise LimitError for an empty or too long prompt or an unknown token id, before any of it travels to the worker."""
    for prompt in prompts:
        if not prompt:
            raise LimitError("the prompt is empty: it must have at least one token", param=param)
        if len(prompt) >= max_model_len:
            raise LimitError(
                f"the prompt has {len(prompt):,} tokens, this model's context {max_model_len:,} with at least one for the answer: "
                "shorten it, or start the server with a larger --max-model-len",
                param=param,
                code="context_length_exceeded",
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            bad = next(i for i in prompt if not 0 <= i < vocab_size)
            raise LimitError(f"the prompt has the token id {bad}, allowed 0 to {vocab_size - 1}", param=param)
