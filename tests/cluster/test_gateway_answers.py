"""Answers in one body and in chunks say the same, however the worker's events are grouped on their way."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine, FakeSettings
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import TinyFiles, write_tiny_model

from kilat.base.errors import EngineError, KilatError
from kilat.base.ids import branch_id
from kilat.cluster.gateway.answer import Pieces
from kilat.cluster.gateway.chat_format import ChatStream, ChatWhole, Choice, Frame
from kilat.cluster.gateway.completions import TextForm, TextStream, TextWhole
from kilat.cluster.gateway.generation import Generation, Job, check_prompts
from kilat.cluster.gateway.params import chat_params, completion_params
from kilat.cluster.gateway.protocol import ChatRequest, CompletionRequest, parse
from kilat.cluster.gateway.sessions import Inbox, SessionTable
from kilat.text.message import MessageParser
from kilat.text.tokenizer import Tokenizer
from kilat.wire.messages import SessionEvent
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SessionRecord

pytestmark = pytest.mark.logic


class FakeLink:
    """Runs the fake engine to the end at once and hands its events out when asked."""

    def __init__(self) -> None:
        self.table = SessionTable()
        self.engine = FakeEngine(FakeSettings())
        self.stopped: list[tuple[str, int]] = []
        self.released = False

    def submit(self, record: SessionRecord, inbox: Inbox, first_index: int) -> None:
        for k in range(record.params.n):
            self.table.add(branch_id(record.session_id, k), inbox, first_index + k)
        self.engine.submit(record)

    def events(self) -> list[SessionEvent]:
        out: list[SessionEvent] = []
        while self.engine.has_work:
            out += self.engine.step()
        return out

    def stop_sample(self, session_id: str, k: int, n: int) -> None:
        self.stopped.append((session_id, k))

    def release(self, session_ids: list[str], n: int) -> None:
        self.released = True


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    files: TinyFiles = write_tiny_model(tmp_path_factory.mktemp("answers"))
    return Tokenizer.from_files(files)


def generation(
    tokenizer: Tokenizer, prompts: Sequence[str], params: SamplingParams, *, continues: bool = False
) -> tuple[Generation, FakeLink]:
    link = FakeLink()
    ids = [tokenizer.encode(p, add_special=False) for p in prompts]
    job = Job(
        prompts=ids,
        params=params,
        skip_special=True,
        continues=continues,
        tenant="",
        salt="",
        priority=0,
        arrival_s=0.0,
        deadline_s=1.0,
    )
    made = Generation(link, tokenizer, job, request_id="cmpl-1", max_lag_tokens=None)  # type: ignore[arg-type]
    made.submit()
    return made, link


def play(made: Generation, link: FakeLink, sizes: Sequence[int], take: Callable[[Pieces], None]) -> None:
    """Deliver the events in groups of ``sizes`` (repeated) and hand ``take`` the pieces of each group."""

    async def run() -> None:
        events = link.events()
        k = 0
        while events and not made.done:
            size = sizes[k % len(sizes)]
            k += 1
            link.table.deliver(events[:size])
            del events[:size]
            take(await asyncio.wait_for(made.next(), 5))

    asyncio.run(run())
    assert made.done


def sse_bodies(data: bytes) -> list[Any]:
    parts = data.decode().split("\n\n")
    assert parts.pop() == ""
    assert all(p.startswith("data: ") for p in parts)
    return [json.loads(p.removeprefix("data: ")) for p in parts]


def _params(kind: type, fields: dict[str, Any]) -> tuple[Any, SamplingParams]:
    if kind is ChatRequest:
        ask = parse(
            msgspec.json.encode({"messages": [{"role": "user", "content": "x"}], **fields}), ChatRequest
        )
        return ask, chat_params(ask, vocab_size=259)
    ask = parse(msgspec.json.encode(fields), CompletionRequest)
    return ask, completion_params(ask, vocab_size=259)


def chat_stream(
    tokenizer: Tokenizer, prompt: str, fields: dict[str, Any], style: str | None, sizes: Sequence[int]
) -> Any:
    """The message per choice that a client puts together from the chunks, and the chunks."""
    _, params = _params(ChatRequest, fields)
    made, link = generation(tokenizer, [prompt], params)
    frame = Frame("tiny", "fp", made, tokenizer)
    choices = [
        Choice(MessageParser(style, tools=True, seed=str(k)) if style else None) for k in range(params.n)
    ]
    writer = ChatStream(frame, choices, include_usage=True)
    data = bytearray()
    play(made, link, sizes, lambda pieces: data.extend(writer.chunks(pieces)))
    chunks = sse_bodies(bytes(data) + writer.end())
    return [_assembled(chunks, k) for k in range(params.n)], chunks


def _assembled(chunks: list[Any], index: int) -> dict[str, Any]:
    out: dict[str, Any] = {
        "content": "",
        "calls": [],
        "logprobs": [],
        "finish": None,
        "role": None,
        "stop_reason": None,
    }
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            out["role"] = delta.get("role", out["role"])
            out["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(out["calls"]):
                    out["calls"].append({"id": call["id"], **call["function"]})
                else:
                    out["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            if choice["logprobs"]:
                out["logprobs"] += choice["logprobs"]["content"]
            out["finish"] = choice["finish_reason"] or out["finish"]
            out["stop_reason"] = choice.get("stop_reason") or out["stop_reason"]
    return out


def chat_whole(
    tokenizer: Tokenizer, prompt: str, fields: dict[str, Any], style: str | None, sizes: Sequence[int]
) -> Any:
    _, params = _params(ChatRequest, fields)
    made, link = generation(tokenizer, [prompt], params)
    frame = Frame("tiny", "fp", made, tokenizer)
    choices = [
        Choice(MessageParser(style, tools=True, seed=str(k)) if style else None) for k in range(params.n)
    ]
    writer = ChatWhole(frame, choices, prompt_logprobs=params.prompt_logprobs is not None)
    play(made, link, sizes, writer.add)
    return json.loads(msgspec.json.encode(writer.body()))


CHATS: list[tuple[str, dict[str, Any], str | None]] = [
    ("hello", {"max_tokens": 30, "seed": 1}, None),
    ("hello", {"max_tokens": 30, "seed": 1, "n": 3}, None),
    ("hello", {"max_tokens": 25, "seed": 2, "logprobs": True, "top_logprobs": 2}, None),
    ("say:one two three four", {"stop": ["three"]}, None),
    (
        "say:one two three four",
        {"stop": ["three"], "include_stop_str_in_output": True, "logprobs": True},
        None,
    ),
    ("say:naïve 星 café 😀!", {}, None),
    ("say:naïve 星 café 😀!", {"max_tokens": 13}, None),
    ('say:Let me see <tool_call>\n{"name": "f", "arguments": {"x": [1, 2]}}\n</tool_call>', {}, "hermes"),
    (
        'say:<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {"y": 1}}</tool_call>',
        {},
        "hermes",
    ),
    ('say:<tool_call>{"name": "f", "arguments": {"x":', {"max_tokens": 40}, "hermes"),
    ('say:{"name": "f", "parameters": {"city": "Paris"}}', {}, "llama"),
    ("say:no call at all", {"logprobs": True}, "hermes"),
]


@pytest.mark.parametrize(("prompt", "fields", "style"), CHATS)
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6))
@settings(max_examples=12)
def test_chunks_of_a_chat_put_together_are_the_whole_message(
    tokenizer: Tokenizer, prompt: str, fields: dict[str, Any], style: str | None, sizes: list[int]
) -> None:
    whole = chat_whole(tokenizer, prompt, fields, style, [1000])
    streamed, chunks = chat_stream(tokenizer, prompt, fields, style, sizes)
    for choice, got in zip(whole["choices"], streamed, strict=True):
        message = choice["message"]
        assert got["role"] == "assistant"
        assert got["content"] == (message["content"] or "")
        calls = [{"id": c["id"], **c["function"]} for c in message.get("tool_calls", ())]
        assert got["calls"] == calls
        assert got["finish"] == choice["finish_reason"]
        assert got["stop_reason"] == choice["stop_reason"]
        assert got["logprobs"] == (choice["logprobs"] or {"content": []})["content"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(c["usage"] is None for c in chunks[:-1])


def completion(
    tokenizer: Tokenizer, fields: dict[str, Any], sizes: Sequence[int]
) -> tuple[Any, list[Any], FakeLink]:
    """The same request whole and as chunks."""
    bodies = []
    for make in (TextWhole, TextStream):
        ask, params = _params(CompletionRequest, fields)
        prompts = [ask.prompt] if isinstance(ask.prompt, str) else ask.prompt
        made, link = generation(tokenizer, prompts, params, continues=True)
        form = TextForm(
            Frame("tiny", "fp", made, tokenizer), ask, prompts if ask.echo else [""] * len(prompts)
        )
        if make is TextWhole:
            whole = TextWhole(form, prompt_logprobs=ask.prompt_logprobs is not None)
            play(made, link, sizes, whole.add)
            bodies.append(json.loads(msgspec.json.encode(whole.body())))
        else:
            stream = TextStream(form, include_usage=True)
            data = bytearray()
            play(made, link, sizes, lambda pieces, s=stream: data.extend(s.chunks(pieces)))
            bodies.append(sse_bodies(bytes(data) + stream.end()))
    return bodies[0], bodies[1], link


COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "hello", "max_tokens": 20, "seed": 1},
    {"prompt": ["hello", "you"], "max_tokens": 9, "n": 2, "seed": 3},
    {"prompt": "naïve", "max_tokens": 9, "seed": 3, "echo": True},
    {"prompt": "naïve", "max_tokens": 9, "seed": 3, "echo": True, "logprobs": 2},
    {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 1},
    {"prompt": "say:star 星 night", "stop": "night", "logprobs": 1, "max_tokens": 50},
]


@pytest.mark.parametrize("fields", COMPLETIONS)
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6))
@settings(max_examples=12)
def test_chunks_of_a_completion_put_together_are_the_whole_text(
    tokenizer: Tokenizer, fields: dict[str, Any], sizes: list[int]
) -> None:
    whole, chunks, _ = completion(tokenizer, fields, sizes)
    for choice in whole["choices"]:
        got: dict[str, Any] = {
            "text": "",
            "finish": None,
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for chunk in chunks:
            for piece in chunk["choices"]:
                if piece["index"] == choice["index"]:
                    got["text"] += piece["text"]
                    got["finish"] = piece["finish_reason"] or got["finish"]
                    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                        got[name] += (piece["logprobs"] or {}).get(name, [])
        assert got.pop("text") == choice["text"]
        assert got.pop("finish") == choice["finish_reason"]
        if choice["logprobs"] is not None:
            assert got == choice["logprobs"]
    assert chunks[-1]["usage"] == whole["usage"]


def test_text_offsets_point_at_the_tokens_in_the_text(tokenizer: Tokenizer) -> None:
    whole, _, _ = completion(
        tokenizer, {"prompt": "héllo ", "max_tokens": 12, "seed": 5, "echo": True, "logprobs": 0}, [3]
    )
    choice = whole["choices"][0]
    told = choice["logprobs"]
    assert len(told["tokens"]) == 7 + 12
    assert told["token_logprobs"][0] is None
    for token, offset in zip(told["tokens"], told["text_offset"]):
        if token.isascii():
            assert choice["text"][offset] == token
    assert told["text_offset"] == sorted(told["text_offset"])


def test_scoring_repeats_the_prompt_and_counts_no_output(tokenizer: Tokenizer) -> None:
    whole, _, _ = completion(
        tokenizer, {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 1}, [5]
    )
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hello", "length")
    assert len(choice["logprobs"]["tokens"]) == 5
    assert whole["usage"]["completion_tokens"] == 0


def test_stop_string_stops_its_sample_in_the_worker_and_only_that(tokenizer: Tokenizer) -> None:
    _, params = _params(ChatRequest, {"stop": ["two"], "n": 2})
    made, link = generation(tokenizer, ["say:one two three"], params)
    play(made, link, [1], lambda pieces: None)
    assert [k for _, k in link.stopped] == [0, 1]
    assert made.output_tokens == 2 * len("one two")


def test_stop_string_in_the_last_event_needs_no_stop(tokenizer: Tokenizer) -> None:
    _, params = _params(ChatRequest, {"stop": ["two"], "max_tokens": 7})
    made, link = generation(tokenizer, ["say:one two three"], params)
    play(made, link, [1], lambda pieces: None)
    assert link.stopped == []
    assert made.samples[0].finish == "stop"
    assert made.samples[0].stop_reason == "two"


def test_stop_token_id_that_was_asked_for_is_the_stop_reason(tokenizer: Tokenizer) -> None:
    body = chat_whole(tokenizer, "say:abc", {"stop_token_ids": [ord("c")]}, None, [1])
    assert body["choices"][0]["stop_reason"] == ord("c")
    assert body["choices"][0]["message"]["content"] == "ab"
    assert chat_whole(tokenizer, "say:abc", {}, None, [1])["choices"][0]["stop_reason"] is None


def test_prompt_logprobs_have_one_entry_per_prompt_token(tokenizer: Tokenizer) -> None:
    body = chat_whole(tokenizer, "hello", {"prompt_logprobs": 2, "max_tokens": 3}, None, [1])
    told = body["prompt_logprobs"]
    assert len(told) == 5
    assert told[0] is None
    assert told[1][str(ord("e"))]["decoded_token"] == "e"


def test_failed_session_fails_the_request_with_the_engines_error(tokenizer: Tokenizer) -> None:
    _, params = _params(ChatRequest, {})
    made, link = generation(tokenizer, ["error!"], params)
    with pytest.raises(EngineError, match="non-finite"):
        play(made, link, [1], lambda pieces: None)


def test_session_that_the_worker_aborts_is_a_retryable_error(tokenizer: Tokenizer) -> None:
    _, params = _params(ChatRequest, {})
    made, link = generation(tokenizer, ["hello"], params)
    link.table.deliver(link.engine.abort(made.session_ids))

    with pytest.raises(KilatError) as e:
        asyncio.run(made.next())
    assert e.value.retryable
    assert e.value.status == 503


def test_cached_tokens_are_counted_once_per_prompt(tokenizer: Tokenizer) -> None:
    _, params = _params(ChatRequest, {"n": 2, "max_tokens": 2, "seed": 1})
    made, link = generation(tokenizer, ["x" * 40] * 2, params)
    play(made, link, [1], lambda pieces: None)
    assert made.cached_tokens == 32, "the second prompt finds the pages of the first"
    assert made.prompt_tokens == 80


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], "limit_exceeded"),
        ([1] * 512, "context_length_exceeded"),
        ([-1], "limit_exceeded"),
        ([259], "limit_exceeded"),
    ],
)
def test_prompt_that_cannot_be_run_is_refused_before_it_travels(prompt: list[int], code: str) -> None:
    with pytest.raises(KilatError) as e:
        check_prompts([[1], prompt], max_model_len=512, vocab_size=259, param="prompt")
    assert (e.value.code, e.value.param, e.value.status) == (code, "prompt", 400)
