"""Log-probabilities in the three shapes that clients know."""

from collections.abc import Sequence
from typing import Any

from kilat.text.tokenizer import Tokenizer
from kilat.wire.messages import TokenLogprob

LOWEST = -9999.0  # JSON has no minus infinity


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_str(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Entries of ``choices[].logprobs.content`` of a chat answer."""
    return [
        {
            **_chat_entry(tokenizer, t.token_id, t.logprob),
            "top_logprobs": [_chat_entry(tokenizer, i, p) for i, p in t.top],
        }
        for t in tokens
    ]


def text_logprobs(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    tokens: Sequence[TokenLogprob | None],
    offsets: Sequence[int],
) -> dict[str, Any]:
    """``choices[].logprobs`` of a text completion; the first token of a prompt has no logprob (None).

    ``offsets`` say where in the choice's text each token begins, in characters.
    """
    return {
        "tokens": [tokenizer.token_str(i) for i in ids],
        "token_logprobs": [_finite(t.logprob) if t is not None else None for t in tokens],
        "top_logprobs": [_by_text(tokenizer, t) if t is not None else None for t in tokens],
        "text_offset": list(offsets),
    }


def _by_text(tokenizer: Tokenizer, t: TokenLogprob) -> dict[str, float]:
    return {tokenizer.token_str(i): _finite(p) for i, p in (*t.top, (t.token_id, t.logprob))}


def prompt_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenLogprob | None]
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: per prompt token a map of token id to its logprob, rank among those listed, and text."""
    out: list[dict[str, Any] | None] = []
    for t in tokens:
        if t is None:
            out.append(None)
            continue
        entries = {str(i): _ranked(tokenizer, i, p, rank) for rank, (i, p) in enumerate(t.top, 1)}
        entries.setdefault(str(t.token_id), _ranked(tokenizer, t.token_id, t.logprob, None))
        out.append(entries)
    return out


def _ranked(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_str(token_id)}
