"""What a benchmark sends: prompts from a file, or random words from a seed."""

import random
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kilat.base.errors import ConfigError

# Short common words, so that a prompt of n words has about n tokens in every tokenizer; the real number is
# measured and reported.
WORDS = tuple(
    (
        "time year people way day man thing woman life child world school state family student group "
        "country problem hand part place case week company system program question work night point home "
        "water room mother area money story fact month lot right study book eye job word business issue "
        "side kind head house service friend father power hour game line end member law car city name"
    ).split()
)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and the number of tokens to generate for it (the end-of-text token is ignored)."""

    prompt: str
    output_tokens: int


class _Entry(msgspec.Struct):
    prompt: str
    output_tokens: int


class _Wrapped(msgspec.Struct):
    requests: list[_Entry]


def random_requests(n: int, input_words: int, output_tokens: int, seed: str) -> list[Request]:
    """``n`` prompts that share no beginning but by chance. Same seed, same prompts."""
    draw = random.Random(seed)
    return [Request(" ".join(draw.choices(WORDS, k=input_words)), output_tokens) for _ in range(n)]


def read_dataset(path: Path, n: int) -> list[Request]:
    """The first ``n`` requests of a file: JSONL, a JSON list, or ``{"requests": [...]}``; a short file is
    gone through again.

    Raises ConfigError for a file of another form.
    """
    data = path.read_bytes().strip()
    try:
        if data.startswith(b"["):
            entries = msgspec.json.decode(data, type=list[_Entry])
        elif data.startswith(b"{") and b"\n{" not in data:
            entries = (
                msgspec.json.decode(data, type=_Wrapped).requests if b'"requests"' in data else [_entry(data)]
            )
        else:
            entries = [_entry(line) for line in data.splitlines() if line.strip()]
    except msgspec.MsgspecError as e:
        raise ConfigError(f'{path.name}: {e}; want rows {{"prompt": text, "output_tokens": number}}') from e
    bad = next((i for i, e in enumerate(entries, 1) if e.output_tokens < 1 or not e.prompt), None)
    if bad is not None or not entries:
        raise ConfigError(f"{path.name}: row {bad or 1} has no prompt, or output_tokens below 1")
    return [Request(e.prompt, e.output_tokens) for e in (entries[i % len(entries)] for i in range(n))]


def fresh(requests: list[Request], round_index: int) -> list[Request]:
    """The same requests for another round, with other first words, so that the prefix cache of the round
    before is of no use.
    """
    if round_index == 0:
        return requests
    return [Request(f"{round_index} {r.prompt}", r.output_tokens) for r in requests]


def _entry(line: bytes) -> _Entry:
    return msgspec.json.decode(line, type=_Entry)
