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
    tokens: Sequence[TokenLogprob | None],
    *,
    ids: Sequence[int] | None = None,
    offset: int = 0,
) -> dict[str, Any]:
    """``choices[].logprobs`` of a text completion. ``offset``: characters of text before the first token.

    The first token of a prompt has no entry (None); ``ids`` then says which token it is.
    """
    texts, logprobs, tops, offsets = [], [], [], []
    for k, t in enumerate(tokens):
        token_id = t.token_id if t is not None else (ids or [])[k]
        text = tokenizer.token_str(token_id)
        texts.append(text)
        offsets.append(offset)
        offset += len(text)
        logprobs.append(_finite(t.logprob) if t is not None else None)
        tops.append(
            {tokenizer.token_str(i): _finite(p) for i, p in (*t.top, (t.token_id, t.logprob))}
            if t is not None
            else None
        )
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


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
