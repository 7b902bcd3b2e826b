"""Rows of a batch input: OpenAI's batch format, or plain ``{"messages": ...}`` / ``{"prompt": ...}``
lines.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kilat.base.errors import ConfigError
from kilat.cli.journal import Identity

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Row:
    """One request. ``custom_id`` is the row's own, or ``line-N`` (counted from 1)."""

    custom_id: str
    path: str
    body: dict[str, Any]


def index(path: Path, model: str | None) -> tuple[Identity, set[str]]:
    """Read the whole input once: its identity, and the ids of its rows. Raises ConfigError for the first bad
    or repeated row.
    """
    digest = hashlib.sha256()
    seen: dict[str, int] = {}
    with open(path, "rb") as f:
        for n, line in enumerate(f, 1):
            digest.update(line)
            row = _row(line, n, path)
            if row is None:
                continue
            if row.custom_id in seen:
                raise _bad(
                    path,
                    n,
                    f"custom_id {row.custom_id!r} is also at line {seen[row.custom_id]}; each needs its own",
                )
            seen[row.custom_id] = n
    if not seen:
        raise ConfigError(f"{path.name} has no rows: write one JSON object a line")
    return Identity(digest.hexdigest(), len(seen), model), set(seen)


def read(path: Path) -> Iterator[Row]:
    """The rows in order; blank lines are skipped."""
    with open(path, "rb") as f:
        for n, line in enumerate(f, 1):
            row = _row(line, n, path)
            if row is not None:
                yield row


def _row(line: bytes, n: int, path: Path) -> Row | None:
    if not line.strip():
        return None
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as e:
        raise _bad(path, n, f"not a JSON object ({e})") from e
    custom_id = fields.pop("custom_id", f"line-{n}")
    if not isinstance(custom_id, str) or not custom_id:
        raise _bad(path, n, f"custom_id is {custom_id!r}, want text")
    body = fields.get("body", fields)
    if not isinstance(body, dict) or ("messages" in body) == ("prompt" in body):
        raise _bad(path, n, 'want "messages" or "prompt", in the row or in its "body"')
    where = CHAT if "messages" in body else COMPLETIONS
    url = fields.get("url", where) if body is not fields else where
    if url != where:
        raise _bad(path, n, f"url is {url!r}, but the body is one for {where}")
    body = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
    return Row(custom_id, where, body)


def _bad(path: Path, n: int, what: str) -> ConfigError:
    return ConfigError(f"{path.name} line {n}: {what}")
