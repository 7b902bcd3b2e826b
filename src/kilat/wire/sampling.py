"""What a request asks of the sampler. Checked once, at the door, by :func:`check`; the engine trusts it afterwards."""

import msgspec

from kilat.base.errors import LimitError, RequestError

MAX_COUNT = 2**31 - 1
MIN_TEMPERATURE = 1e-30  # logits divided by less are infinite in fp32
MAX_SAMPLES = 16
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_GRAMMAR_BYTES = 64 * 1024
MAX_REGEX_BYTES = 2 * 1024


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A constraint on the output text.

    ``kind`` is ``json_schema`` (``text`` is the schema), ``json_object`` (``text`` empty), ``regex``, ``choice`` (``text`` is a JSON
    list of strings) or ``ebnf`` (a Lark or GBNF grammar).
    """

    kind: str
    text: str = ""


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling parameters of one request; defaults are OpenAI's. Immutable.

    ``temperature`` 0 is greedy (the lowest id wins a tie). ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch a filter off.
    ``seed`` None lets the gateway draw one. ``max_tokens`` None means up to the context limit. ``logprobs`` is the number of
    alternatives reported beside the sampled token (0 = only the sampled one, None = nothing). Stop strings are the text side's
    business (gateway, ``LLM``): the engine sees ids only.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 1e-6, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("top_k", 0, MAX_COUNT),
    ("n", 1, MAX_SAMPLES),
    ("min_tokens", 0, MAX_COUNT),
)


def check(params: SamplingParams, *, vocab_size: int) -> None:
    """Raise :class:`RequestError` or :class:`LimitError` for the first value out of range. Checks no text lengths against the
    context: that needs the prompt (``policy/sched`` does it at submission)."""
    for name, low, high in _RANGES:
        value = getattr(params, name)
        if not low <= value <= high:  # false for NaN too
            raise LimitError(f"{name} is {value}, allowed {low:.10g} to {high:.10g}", param=name)
    if 0.0 < params.temperature < MIN_TEMPERATURE:
        raise LimitError(
            f"temperature is {params.temperature}, allowed 0 (greedy) or {MIN_TEMPERATURE:g} to 100",
            param="temperature",
        )
    if params.top_p == 0.0:
        raise LimitError("top_p is 0, allowed above 0 to 1; use temperature 0 for greedy", param="top_p")
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        raise LimitError(f"seed is {params.seed}, allowed 64-bit integers", param="seed")
    if params.max_tokens is not None and not 1 <= params.max_tokens <= MAX_COUNT:
        raise LimitError(f"max_tokens is {params.max_tokens}, allowed 1 to {MAX_COUNT}", param="max_tokens")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, above max_tokens {params.max_tokens}", param="min_tokens"
        )
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and not 0 <= value <= MAX_TOP_LOGPROBS:
            raise LimitError(f"{name} is {value}, allowed 0 to {MAX_TOP_LOGPROBS}", param=name)
    _check_stops(params, vocab_size)
    _check_bias(params, vocab_size)
    if params.grammar is not None:
        _check_grammar(params.grammar)


def _check_stops(params: SamplingParams, vocab_size: int) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise LimitError(f"{len(params.stop)} stop strings, at most {MAX_STOP_STRINGS}", param="stop")
    for s in params.stop:
        size = len(s.encode("utf-8", "surrogatepass"))
        if not 1 <= size <= MAX_STOP_BYTES:
            raise LimitError(f"a stop string has {size} bytes, allowed 1 to {MAX_STOP_BYTES}", param="stop")
    if len(params.stop_token_ids) > MAX_STOP_IDS:
        raise LimitError(
            f"{len(params.stop_token_ids)} stop token ids, at most {MAX_STOP_IDS}", param="stop_token_ids"
        )
    for i in params.stop_token_ids:
        if not 0 <= i < vocab_size:
            raise LimitError(f"stop token id {i}, allowed 0 to {vocab_size - 1}", param="stop_token_ids")


def _check_bias(params: SamplingParams, vocab_size: int) -> None:
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise LimitError(
            f"{len(params.logit_bias)} logit_bias entries, at most {MAX_LOGIT_BIAS}", param="logit_bias"
        )
    for i, b in params.logit_bias.items():
        if not 0 <= i < vocab_size:
            raise LimitError(
                f"logit_bias names token id {i}, allowed 0 to {vocab_size - 1}", param="logit_bias"
            )
        if not -100.0 <= b <= 100.0:
            raise LimitError(f"logit_bias of token id {i} is {b}, allowed -100 to 100", param="logit_bias")


def _check_grammar(grammar: Grammar) -> None:
    limit = MAX_REGEX_BYTES if grammar.kind == "regex" else MAX_GRAMMAR_BYTES
    if grammar.kind not in ("json_schema", "json_object", "regex", "choice", "ebnf"):
        raise RequestError(
            f"grammar kind {grammar.kind!r} is unknown; use json_schema, json_object, regex, choice or ebnf",
            param="grammar",
        )
    size = len(grammar.text.encode("utf-8", "surrogatepass"))
    if size > limit:
        raise LimitError(f"the {grammar.kind} grammar has {size} bytes, limit {limit}", param="grammar")
