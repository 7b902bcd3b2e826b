"""Structured output: grammars compiled off the loop, and the matcher that walks along with a session.

The grammar library (llguidance) bounds its own work per grammar and per step; what is over a bound is an error of that request alone.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from kilat.base.errors import RequestError
from kilat.wire.sampling import Grammar

COMPILE_LIMIT_S = 5.0
_KEPT = 64
_LIMITS = LLParserLimits(max_grammar_size=200_000, max_lexer_states=100_000, initial_lexer_fuel=2_000_000)


class GrammarCompiler:
    """Compiles grammars on two threads of its own and keeps the last 64. Owned by one engine.

    ``tokenizer_json`` is the tokenizer in the ``tokenizers`` library's JSON form; ``vocab_size`` the model's (rows of logits).
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        self._tokenizer = self._pool.submit(
            LLTokenizer, tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_ids)
        )
        self._done: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self.vocab_size = vocab_size

    def compile(self, grammar: Grammar) -> "Future[Matcher]":
        """A matcher at the start of ``grammar``; the future raises RequestError for a grammar that is wrong or over a limit."""
        kept = self._kept(grammar)
        if kept is None:
            return self._pool.submit(self._compile, grammar)
        ready: Future[Matcher] = Future()
        ready.set_result(kept)
        return ready

    def ready(self, grammar: Grammar) -> "Matcher":
        """The same at once, for a grammar that has been compiled before (again, if it has been dropped since)."""
        return self._kept(grammar) or self._compile(grammar)

    def _kept(self, grammar: Grammar) -> "Matcher | None":
        with self._lock:
            kept = self._done.get(grammar)
            if kept is None:
                return None
            self._done.move_to_end(grammar)
            return Matcher(kept.deep_copy(), self.vocab_size)

    def _compile(self, grammar: Grammar) -> "Matcher":
        try:
            text = _to_library(grammar)
        except (ValueError, RecursionError, GbnfToLarkError) as e:
            raise RequestError(
                f"the {grammar.kind} grammar is not valid: {_short(str(e))}", param="grammar"
            ) from e
        matcher = LLMatcher(self._tokenizer.result(), text, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise RequestError(
                f"the {grammar.kind} grammar is not valid or too large: {_short(matcher.get_error())}",
                param="grammar",
            )
        with self._lock:
            self._done[grammar] = matcher
            while len(self._done) > _KEPT:
                self._done.popitem(last=False)
        return Matcher(matcher.deep_copy(), self.vocab_size)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Matcher:
    """Where one session is in its grammar. A function of the output tokens: :meth:`advance` over them rebuilds it."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def forbid(self, logits: torch.Tensor) -> str | None:
        """Set the logits [V] of tokens that may not come next to -inf, in place. Returns the reason when the matcher failed."""
        allowed = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8)
        if self._matcher.is_error():
            return f"the grammar went over a limit: {_short(self._matcher.get_error())}"
        n = min(len(allowed), self._vocab_size)
        logits[n:] = -torch.inf
        logits[:n][torch.from_numpy(allowed[:n] == 0)] = -torch.inf
        return None

    def advance(self, token_ids: Sequence[int]) -> str | None:
        """Walk over sampled tokens. Returns the reason when one of them does not fit."""
        if self._matcher.consume_tokens(list(token_ids)):
            return None
        return f"the output left its grammar: {_short(self._matcher.get_error())}"

    @property
    def finished(self) -> bool:
        """Nothing but an end-of-sequence token may follow."""
        return self._matcher.is_stopped()


def _to_library(grammar: Grammar) -> str:
    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(grammar.text)
    if grammar.kind == "json_object":
        return LLMatcher.grammar_from_json_schema('{"type": "object"}')
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        options = json.loads(grammar.text)
        if not isinstance(options, list) or not options or not all(isinstance(o, str) for o in options):
            raise ValueError("choice needs a list of at least one string")
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(o) for o in options))
    text = grammar.text
    if "::=" in text:
        text = gbnf_to_lark(text)
    return LLMatcher.grammar_from_lark(text)


def _short(message: str) -> str:
    # the library appends its parser's state, which is of no use to a client
    line = " ".join(message.split("<state>")[0].split())
    return line if len(line) <= 300 else line[:297] + "..."
