"""Outcome: what the result of a row means for its session, and the event that tells it."""

from collections.abc import Sequence

from kilat.base import metrics
from kilat.base.errors import EngineError
from kilat.policy.sched.plan import Row, StepResult
from kilat.policy.sched.roster import Roster
from kilat.policy.sched.session import Session, State
from kilat.wire.messages import SessionEvent, TokenLogprob

MAX_TOKEN_ID = 2**31 - 1


class Outcome:
    """Takes results in, for the sessions of ``roster``. Positions, tokens and ``seq`` of a session change here."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self._page_tokens = roster.config.page_tokens
        self._may_seal = roster.config.prefix_cache

    def row(self, s: Session, row: Row, i: int, result: StepResult) -> SessionEvent | None:
        """Row ``i`` of a committed step; its session's event, if there is news. What is wrong with it ends this session alone."""
        if i in result.failed:
            return self.end(s, "error", error=result.failed[i])
        try:
            s.n_computed = row.start + len(row.token_ids)
            if row.start < len(s.tokens) - 1:  # not only the newest token
                self.roster.counts[metrics.PREFILL_TOKENS] += len(row.token_ids)
            if row.prompt_logprobs and s.prompt_logprobs is not None:
                s.prompt_logprobs += result.prompt_logprobs[i]
            if not row.sample:
                self.seal(s)
                return None
            ids, finish, stop_id = self._take_output(s, i, result)
            logprobs = result.logprobs[i][: len(ids)] if s.params.logprobs is not None else None
            self.seal(s)
        except Exception as e:  # noqa: BLE001  (a result that breaks one session's state must not touch the others)
            return self.end(
                s, "error", error=f"the step's result could not be used ({type(e).__name__}: {e})"
            )
        self.roster.counts[metrics.OUTPUT_TOKENS] += len(ids)
        if finish is not None:
            return self.end(s, finish, ids, stop_id=stop_id, logprobs=logprobs)
        if (s.hand_over or s.held) and s.state is State.RUNNING:
            if s.hand_over:
                self.roster.freeze(s)
            else:
                self.roster.let_go(s)
        return self._event(s, ids, logprobs=logprobs)

    def _take_output(
        self, s: Session, i: int, result: StepResult
    ) -> tuple[list[int], str | None, int | None]:
        ids = result.token_ids[i]
        stopped = i in result.stopped
        if not ids and not stopped:
            raise EngineError("no token was sampled")
        if any(type(token) is not int or not 0 <= token <= MAX_TOKEN_ID for token in ids):
            raise EngineError("a sampled id is no token id")
        if s.n_flight and len(ids) > 1:
            raise EngineError("more than one token was sampled while the next step was planned for one")
        taken, finish, stop_id = s.take_output(ids)
        if stopped and finish != "stop":
            finish = "stop"
        return taken, finish, stop_id

    def seal(self, s: Session) -> None:
        """Name the pages that this step has filled, so that others can find them."""
        n_pages = s.n_computed // self._page_tokens
        if s.table is not None and n_pages > s.table.n_sealed and self._may_seal:
            s.table.seal(s.name_pages(n_pages, self._page_tokens), n_pages)

    def end(
        self,
        s: Session,
        finish: str,
        ids: Sequence[int] = (),
        *,
        stop_id: int | None = None,
        logprobs: list[TokenLogprob] | None = None,
        error: str | None = None,
    ) -> SessionEvent:
        """Finish a session; returns its last event."""
        event = self._event(s, ids, finish=finish, stop_id=stop_id, logprobs=logprobs, error=error)
        self.roster.finish(s, finish)
        return event

    def _event(
        self,
        s: Session,
        ids: Sequence[int],
        *,
        finish: str | None = None,
        stop_id: int | None = None,
        logprobs: list[TokenLogprob] | None = None,
        error: str | None = None,
    ) -> SessionEvent:
        seq = s.seq
        s.seq += 1
        n_hit = 0
        prompt_logprobs = None
        if not s.has_spoken:
            s.has_spoken = True
            n_hit = s.n_hit or 0
            if finish in (None, "stop", "length"):
                prompt_logprobs, s.prompt_logprobs = s.prompt_logprobs, None
        return SessionEvent(
            session_id=s.id,
            epoch=s.record.epoch,
            seq=seq,
            token_ids=list(ids),
            finish=finish,
            stop_id=stop_id,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=n_hit,
            error=error,
            error_code=EngineError.code if error is not None else None,
        )
