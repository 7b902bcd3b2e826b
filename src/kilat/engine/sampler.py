"""From logits to the ids of a step: penalties, biases, grammars, the draw, log-probabilities.

A session's sampler state is a function of its tokens: :meth:`Sampler.admit` builds it from them, so nothing has to be saved or moved.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kilat.engine.grammar import Matcher
from kilat.ops.kernels import Kernels
from kilat.ops.sample import Filter, top_logprobs
from kilat.policy.sched.plan import Admitted, Row, StepResult
from kilat.wire.messages import TokenLogprob
from kilat.wire.sampling import Grammar, SamplingParams


@dataclass(slots=True)
class SamplerState:
    """What the sampler knows of one session.

    For penalties only: ``counts`` of output tokens, and for the repetition penalty ``known``, the distinct tokens of prompt and output,
    with the same as a tensor, ``seen``. ``prompt_ids`` are kept for prompt log-probabilities only. ``banned`` are the ids that may not
    come before ``min_tokens``. ``plain``: nothing touches its logits.
    """

    params: SamplingParams
    seed: int
    n_output: int
    banned: Tensor | None
    matcher: Matcher | None
    plain: bool
    penalised: bool
    prompt_ids: list[int]
    known: set[int] = field(default_factory=set)
    seen: Tensor | None = None
    counts: Counter[int] = field(default_factory=Counter)

    def count(self, token: int) -> None:
        """Hear of a sampled token."""
        self.counts[token] += 1
        if self.seen is not None and token not in self.known:
            self.known.add(token)
            self.seen = torch.cat((self.seen, torch.tensor([token])))


@dataclass(slots=True)
class _Choice:
    """Row ``row`` of a step samples from row ``place`` of its logits; ``token`` is the likeliest until another is chosen."""

    row: int
    place: int
    token: int


class Sampler:
    """Owns the sampler state of all running sessions. One thread."""

    def __init__(self, kernels: Kernels, eos_ids: tuple[int, ...]) -> None:
        self.kernels = kernels
        self.eos_ids = eos_ids
        self.states: dict[str, SamplerState] = {}

    def admit(self, admitted: Admitted, matcher: Matcher | None) -> None:
        """Build a session's state. ``matcher`` stands at the start of its grammar and is moved over the output so far."""
        p = admitted.params
        output = admitted.token_ids[admitted.n_prompt :]
        penalised = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
        known = set(admitted.token_ids) if p.repetition_penalty != 1.0 else set()
        banned = sorted(set(p.stop_token_ids) | set(self.eos_ids)) if p.min_tokens > 0 else []
        if matcher is not None and output:
            matcher.advance(output)
        self.states[admitted.session_id] = SamplerState(
            params=p,
            seed=admitted.seed,
            n_output=len(output),
            banned=torch.tensor(banned) if banned else None,
            matcher=matcher,
            plain=not (penalised or p.logit_bias or banned or matcher is not None),
            penalised=penalised,
            prompt_ids=admitted.token_ids[: admitted.n_prompt] if p.prompt_logprobs is not None else [],
            known=known,
            seen=torch.tensor(list(known)) if known else None,
            counts=Counter(output) if penalised else Counter(),
        )

    def admit_all(self, admitted: list[Admitted], matcher_of: Callable[[Grammar], Matcher] | None) -> None:
        """Admit the sessions of a plan; ``matcher_of`` gives a matcher at the start of a grammar."""
        for a in admitted:
            grammar = a.params.grammar
            self.admit(a, matcher_of(grammar) if grammar is not None and matcher_of is not None else None)

    def forget(self, session_id: str) -> None:
        self.states.pop(session_id, None)

    def is_easy(self, row: Row) -> bool:
        """Whether the row's ids can be drawn from its logits alone, with nothing reported beside them."""
        s = self.states[row.session_id]
        return not row.prompt_logprobs and (not row.sample or (s.plain and s.params.logprobs is None))

    def sample(self, rows: list[Row], logits: Tensor) -> StepResult:
        """logits [S, V] of the rows that sample or want prompt log-probabilities, in the order of ``StepBatch.logits_at``."""
        token_ids: list[list[int]] = [[] for _ in rows]
        result = StepResult(token_ids)
        stopped: set[int] = set()
        top_ids, top_values = self.kernels.greedy(logits)
        best, tops = top_ids.tolist(), top_values.tolist()
        chosen: list[_Choice] = []
        open_: list[_Choice] = []
        at = 0
        for i, row in enumerate(rows):
            n = row.n_tokens if row.prompt_logprobs else int(row.sample)
            if row.prompt_logprobs:
                result.prompt_logprobs[i] = self._prompt_logprobs(row, logits[at : at + n])
            at += n
            if not row.sample:
                continue
            if not math.isfinite(tops[at - 1]):
                result.failed[i] = (
                    "the model's output is not finite (NaN or infinity); its weights or dtype may be at fault"
                )
                continue
            state = self.states[row.session_id]
            chosen.append(_Choice(i, at - 1, best[at - 1]))
            if not (state.plain and state.params.temperature == 0.0):
                open_.append(chosen[-1])
        self._choose(rows, open_, logits, result)
        for choice in chosen:
            i = choice.row
            if i in result.failed or not self._take(rows[i], choice, logits, result):
                continue
            token_ids[i].append(choice.token)
            state = self.states[rows[i].session_id]
            if state.matcher is not None and state.matcher.finished:
                stopped.add(i)
        return StepResult(
            token_ids, result.logprobs, result.prompt_logprobs, frozenset(stopped), result.failed
        )

    def _choose(self, rows: list[Row], choices: list[_Choice], logits: Tensor, result: StepResult) -> None:
        """Set the tokens of rows that are not simply greedy; ``result.failed`` gets those that cannot have one. All draws are one call."""
        if not choices:
            return
        # a copy on the host, whatever device computed them; only rows that need it
        own = logits[[c.place for c in choices]].to("cpu", torch.float32)
        drawn: list[int] = []
        filters: list[Filter] = []
        for k, choice in enumerate(choices):
            row = rows[choice.row]
            s = self.states[row.session_id]
            p = s.params
            reason = self._adjust(s, own[k])
            if reason is not None:
                result.failed[choice.row] = reason
            elif p.temperature == 0.0:
                choice.token = int(self.kernels.greedy(own[k : k + 1])[0])
            else:
                drawn.append(k)
                position = row.start + row.n_tokens
                filters.append(Filter(p.temperature, p.top_k, p.top_p, p.min_p, s.seed, position))
        if drawn:
            x = own if len(drawn) == len(choices) else own[drawn]
            for k, token in zip(drawn, self.kernels.sample_rows(x, filters), strict=True):
                choices[k].token = token

    def _take(self, row: Row, choice: _Choice, logits: Tensor, result: StepResult) -> bool:
        """Record the token of a row; False when its grammar does not take it (``result.failed`` says why)."""
        i, token = choice.row, choice.token
        s = self.states[row.session_id]
        p = s.params
        if p.logprobs is not None:
            result.logprobs[i] = [_logprob(logits[choice.place].float().cpu(), token, p.logprobs)]
        s.n_output += 1
        if s.penalised:
            s.count(token)
        if s.matcher is not None and token not in self.eos_ids:
            reason = s.matcher.advance([token])
            if reason is not None:
                result.failed[i] = reason
                return False
        return True

    def _adjust(self, s: SamplerState, logits: Tensor) -> str | None:
        """Penalties, bias, minimum length and grammar, in place on logits [V] fp32. Returns the reason when the grammar failed.

        Repetition: seen tokens' logits are divided (if positive) or multiplied by the penalty (arXiv:1909.05858). Presence and
        frequency: OpenAI's definition, over output tokens.
        """
        p = s.params
        if s.seen is not None:
            value = logits[s.seen]
            logits[s.seen] = torch.where(
                value > 0, value / p.repetition_penalty, value * p.repetition_penalty
            )
        if s.counts and (p.presence_penalty != 0.0 or p.frequency_penalty != 0.0):
            ids = torch.tensor(list(s.counts.keys()))
            counts = torch.tensor(list(s.counts.values()), dtype=torch.float32)
            logits[ids] -= p.presence_penalty + p.frequency_penalty * counts
        if p.logit_bias:
            logits[torch.tensor(list(p.logit_bias.keys()))] += torch.tensor(list(p.logit_bias.values()))
        if s.banned is not None and s.n_output < p.min_tokens:
            logits[s.banned] = -math.inf
        return s.matcher.forbid(logits) if s.matcher is not None else None

    def _prompt_logprobs(self, row: Row, logits: Tensor) -> list[TokenLogprob]:
        """Log-probabilities of the prompt tokens at positions start + 1 ..., each from the logits [n, V] of the token before it."""
        state = self.states[row.session_id]
        following = state.prompt_ids[row.start + 1 : row.start + row.n_tokens + 1]
        k = state.params.prompt_logprobs or 0
        return [_logprob(logits[j].float().cpu(), token, k) for j, token in enumerate(following)]


def _logprob(logits: Tensor, token: int, k: int) -> TokenLogprob:
    own, top = top_logprobs(logits, token, k)
    return TokenLogprob(token, own, top)
