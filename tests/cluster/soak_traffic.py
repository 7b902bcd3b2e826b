"""The requests of a soak run: request ``i`` of a seed is always the same one, whatever order they are sent in.

About 15 in 100 are bad, each with the status it must get, and 30 in 100 are good but given up by their client at some moment. Good
ones are drawn from a small set, so that most are asked several times and must be answered the same each time.
"""

import json
import random
import re
from dataclasses import dataclass
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON_TYPE = {"content-type": "application/json"}
BAD_SHARE, CANCELLED_SHARE = 0.15, 0.30 / 0.85
CANCELS = ("early", "late", "chunks", "reset", "half_body")
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand part place "
    "case week company system program question work night point home water room mother area money story fact month lot right study"
).split()
N_PROMPTS = 12
SYSTEM = "You are a careful assistant. Answer in one short sentence, in plain words, and never repeat the question."
NUMBER = r"[1-9][0-9]{0,3}"
CHOICES = ["yes", "no", "maybe"]


@dataclass(frozen=True)
class Ask:
    """One HTTP request. ``status`` is the one it must get; ``cancel`` how its client gives up, at ``moment`` (0 to 1 of what that way
    of giving up allows). Answers to asks of one ``key`` must be equal. ``form`` says what its text must look like.
    """

    index: int
    kind: str
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: int = 200
    stream: bool = False
    samples: int = 1
    max_tokens: int = 0
    key: str = ""
    form: str = ""
    cancel: str | None = None
    moment: float = 0.0


class Traffic:
    """Requests for the server's ``model``; ``context_words`` are more words than any prompt may have."""

    def __init__(self, seed: int, model: str, *, context_words: int) -> None:
        self.seed, self.model, self.context_words = seed, model, context_words
        draw = random.Random(f"{seed} prompts")
        self.prompts = [" ".join(draw.choices(WORDS, k=draw.randint(4, 30))) for _ in range(N_PROMPTS)]

    def ask(self, index: int) -> Ask:
        draw = random.Random(f"{self.seed} {index}")
        if draw.random() < BAD_SHARE:
            return self._bad(index, draw)
        return self._good(index, draw)

    # -- good ---------------------------------------------------------------------------------------------------------------------

    def _good(self, index: int, draw: random.Random) -> Ask:
        kind = draw.choices(
            ["greedy", "long", "sampled", "samples", "structured", "stop", "logprobs", "penalties"],
            [35, 10, 15, 10, 15, 5, 5, 5],
        )[0]
        path = draw.choice([CHAT, TEXT])
        form, fields = self._fields(kind, path, draw)
        prompt = draw.choice(self.prompts)
        if path == CHAT:
            system = [{"role": "system", "content": SYSTEM}] if draw.random() < 0.4 else []
            fields["messages"] = [*system, {"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        stream = draw.random() < 0.5
        cancel = draw.choice(CANCELS) if draw.random() < CANCELLED_SHARE else None
        body = {"model": self.model, **fields}
        key = f"{path} {json.dumps(body, sort_keys=True)}"
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return Ask(
            index,
            kind,
            "POST",
            path,
            JSON_TYPE,
            json.dumps(body).encode(),
            stream=stream,
            samples=fields.get("n", 1),
            max_tokens=fields["max_tokens"],
            key=key,
            form=form,
            cancel=cancel,
            moment=draw.random(),
        )

    def _fields(self, kind: str, path: str, draw: random.Random) -> tuple[str, dict[str, Any]]:
        """(form of the text, fields of the body) of one kind of request."""
        fields: dict[str, Any] = {"temperature": 0, "max_tokens": draw.choice([1, 3, 8, 12])}
        form = ""
        if kind == "long":
            fields |= {"max_tokens": draw.choice([64, 96]), "ignore_eos": True}
        elif kind == "sampled":
            fields |= {
                "temperature": 0.9,
                "top_p": draw.choice([0.9, 1.0]),
                "top_k": draw.choice([0, 40]),
                "seed": draw.randrange(2),
            }
        elif kind == "samples":
            fields |= {"temperature": 1.0, "n": 2, "seed": draw.randrange(2)}
        elif kind == "structured":
            form, more = self._structure(draw)
            fields |= more
        elif kind == "stop":
            fields |= {"stop": draw.sample([" the", "a", ".", "e ", "\n", "qx"], 3), "max_tokens": 12}
        elif kind == "logprobs" and path == CHAT:
            fields |= {"logprobs": True, "top_logprobs": 3}
        elif kind == "logprobs":
            fields |= {"logprobs": 2}
        elif kind == "penalties":
            fields |= {
                "repetition_penalty": 1.2,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.3,
                "logit_bias": {"17": -100, "40": 1.5},
                "min_tokens": 2,
                "max_tokens": 8,
            }
        return form, fields

    def _structure(self, draw: random.Random) -> tuple[str, dict[str, Any]]:
        form = draw.choice(["object", "schema", "regex", "choice"])
        if form == "object":
            return form, {"response_format": {"type": "json_object"}, "max_tokens": 12}
        if form == "schema":
            # many names, so that compiled grammars are dropped and made again
            name = f"{draw.choice(WORDS)}_{draw.randrange(100)}"
            schema = {
                "type": "object",
                "properties": {name: {"type": "boolean"}},
                "required": [name],
                "additionalProperties": False,
            }
            wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            return form, {"response_format": wanted, "max_tokens": 40}
        if form == "regex":
            return form, {"guided_regex": NUMBER, "max_tokens": 8}
        return form, {"guided_choice": CHOICES, "max_tokens": 8}

    # -- bad ----------------------------------------------------------------------------------------------------------------------

    def _bad(self, index: int, draw: random.Random) -> Ask:
        name, status, path, body, headers, method = draw.choice(self._all_bad(draw))
        return Ask(index, f"bad: {name}", method, path, headers, body, status=status)

    def _all_bad(self, draw: random.Random) -> list[tuple[str, int, str, bytes, dict[str, str], str]]:
        """(what is wrong, status, path, body, headers, method)"""
        prompt = draw.choice(self.prompts)
        long = " ".join(draw.choices(WORDS, k=self.context_words))
        good = {"prompt": prompt, "max_tokens": 4}
        fields: list[tuple[str, int, dict[str, Any]]] = [
            ("temperature", 400, {"temperature": -1}),
            ("top_p", 400, {"top_p": 1.5}),
            ("n", 400, {"n": 17}),
            ("max_tokens", 400, {"max_tokens": 0}),
            ("type", 400, {"max_tokens": "four"}),
            ("unknown field", 400, {"temprature": 1}),
            ("bias", 400, {"logit_bias": {"999999999": 1}}),
            ("stops", 400, {"stop": ["x"] * 17}),
            ("empty stop", 400, {"stop": [""]}),
            ("long prompt", 400, {"prompt": long}),
            ("empty prompt", 400, {"prompt": []}),
            ("token id", 400, {"prompt": [1, 2, 99_999_999]}),
            ("regex", 400, {"guided_regex": "(" * draw.randint(1, 9)}),
            ("grammar", 400, {"guided_grammar": f"start: ( {draw.random()}"}),
            ("schema", 400, {"guided_json": {"type": draw.randrange(99)}}),
            ("choices", 400, {"guided_choice": []}),
            ("two forms", 400, {"guided_regex": "a", "guided_choice": ["a"]}),
            ("model", 404, {"model": "gpt-9"}),
        ]
        out = [(n, s, TEXT, json.dumps({**good, **f}).encode(), JSON_TYPE, "POST") for n, s, f in fields]
        chat: list[tuple[str, dict[str, Any]]] = [
            ("messages", {"messages": "hello"}),
            ("no messages", {"messages": []}),
            ("role", {"messages": [{"role": "wizard", "content": prompt}]}),
            ("long chat", {"messages": [{"role": "user", "content": long}]}),
        ]
        out += [(n, 400, CHAT, json.dumps(f).encode(), JSON_TYPE, "POST") for n, f in chat]
        whole = json.dumps(good).encode()
        return [
            *out,
            ("json", 400, TEXT, whole[: draw.randrange(len(whole))], JSON_TYPE, "POST"),
            ("utf-8", 400, TEXT, b'{"prompt": "\xff\xfe"}', JSON_TYPE, "POST"),
            ("nesting", 400, CHAT, b'{"messages": ' + b"[" * 50_000, JSON_TYPE, "POST"),
            ("list", 400, CHAT, b"[1, 2]", JSON_TYPE, "POST"),
            ("content type", 415, TEXT, whole, {"content-type": "text/plain"}, "POST"),
            ("method", 405, TEXT, b"", {}, "GET"),
            ("path", 404, f"/v1/{draw.choice(WORDS)}", whole, JSON_TYPE, "POST"),
        ]


def what_is_wrong(ask: Ask, texts: list[str], finishes: list[str | None]) -> str | None:
    """Why a complete answer cannot be right; None when it may be."""
    if len(texts) != ask.samples:
        return f"{len(texts)} samples, asked for {ask.samples}"
    for text, finish in zip(texts, finishes, strict=True):
        if finish not in ("stop", "length"):
            return f"finish reason {finish!r}"
        if ask.form and finish == "stop" and not _has_form(ask, text):
            return f"{text!r} is no {ask.form}"
    return None


def _has_form(ask: Ask, text: str) -> bool:
    if ask.form == "regex":
        return re.fullmatch(NUMBER, text) is not None
    if ask.form == "choice":
        return text in CHOICES
    value = json.loads(text)
    if ask.form == "object":
        return isinstance(value, dict)
    schema = json.loads(ask.body)["response_format"]["json_schema"]["schema"]
    return set(value) == set(schema["required"]) and all(isinstance(v, bool) for v in value.values())
