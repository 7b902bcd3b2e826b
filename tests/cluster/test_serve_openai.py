"""A server as the unmodified openai client sees it: real processes, fake engine."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from served import Served

pytestmark = pytest.mark.cluster

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture
def client(shared_server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[list[str], list[str | None], Any]:
    """Texts and finish reasons per choice, and the usage, of a streamed chat."""
    n = fields.get("n", 1)
    texts, finish, usage = [""] * n, [None] * n, None
    with client.chat.completions.create(
        model="tiny", stream=True, stream_options={"include_usage": True}, **fields
    ) as chunks:
        for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                finish[choice.index] = choice.finish_reason or finish[choice.index]
    return texts, finish, usage


def test_model_list_and_model(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "kilat"
    with pytest.raises(openai.NotFoundError) as e:
        client.models.retrieve("some/other")
    assert e.value.code == "model_not_found"


def test_chat_answers_with_text_and_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=user("say:Hello wörld 😀"))
    choice = answer.choices[0]
    assert choice.message.content == "Hello wörld 😀"
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("Hello wörld 😀".encode())
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.id.startswith("chatcmpl-")
    assert answer._request_id == answer.id
    assert answer.system_fingerprint is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 1, "max_tokens": 40},
        {"seed": 2, "max_tokens": 40, "n": 4},
        {"seed": 3, "max_tokens": 40, "temperature": 0},
        {"seed": 4, "max_tokens": 200, "stop": ["moon", "café"]},
        {"seed": 5, "max_tokens": 200, "stop": "wind", "extra_body": {"include_stop_str_in_output": True}},
        {"seed": 6, "max_tokens": 60, "n": 2, "stop": ["stone"]},
        {"seed": 7, "max_tokens": 60, "extra_body": {"min_tokens": 30, "stop": [" "]}},
    ],
)
def test_streamed_text_is_the_unstreamed_text(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    whole = client.chat.completions.create(model="tiny", messages=user("tell me"), **fields)
    texts, finish, usage = streamed(client, messages=user("tell me"), **fields)
    assert texts == [c.message.content for c in whole.choices]
    assert finish == [c.finish_reason for c in whole.choices]
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_samples_of_one_request_differ_and_repeat_with_the_seed(client: openai.OpenAI) -> None:
    def texts() -> list[str | None]:
        answer = client.chat.completions.create(model="tiny", messages=user("x"), n=4, seed=11, max_tokens=30)
        return [c.message.content for c in answer.choices]

    assert len(set(texts())) == 4
    assert texts() == texts()


def test_second_same_prompt_reports_cached_tokens(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "messages": user("cached? " * 10), "max_tokens": 2, "seed": 1}
    first = client.chat.completions.create(**fields).usage
    second = client.chat.completions.create(**fields).usage
    salted = client.chat.completions.create(**fields, extra_body={"cache_salt": "mine"}).usage
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens > 0
    assert salted.prompt_tokens_details.cached_tokens == 0, "another salt must not see the pages"


def test_logprobs_come_with_their_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=user("say:abc"), logprobs=True, top_logprobs=3
    )
    told = answer.choices[0].logprobs.content
    assert [t.token for t in told] == ["a", "b", "c"]
    assert told[0].bytes == [97]
    assert [len(t.top_logprobs) for t in told] == [3, 3, 3]


def test_tool_call_is_parsed(client: openai.OpenAI) -> None:
    said = 'say:<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    answer = client.chat.completions.create(model="tiny", messages=user(said), tools=[WEATHER])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    call = choice.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})


def test_streamed_tool_call_is_the_same_call(client: openai.OpenAI) -> None:
    said = 'say:Sure. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    name, arguments, content, finish = "", "", "", None
    for chunk in client.chat.completions.create(
        model="tiny", messages=user(said), tools=[WEATHER], stream=True
    ):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or ():
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    assert (name, json.loads(arguments), finish) == ("get_weather", {"city": "Paris"}, "tool_calls")
    assert content.strip() == "Sure."


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_tool_call_is_parsed_from_plain_json(client: openai.OpenAI, choice: Any) -> None:
    said = 'say:{"name": "get_weather", "parameters": {"city": "Paris"}}'
    answer = client.chat.completions.create(
        model="tiny", messages=user(said), tools=[WEATHER], tool_choice=choice
    )
    call = answer.choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})


def test_calls_are_plain_text_when_tool_choice_is_none(client: openai.OpenAI) -> None:
    said = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    answer = client.chat.completions.create(
        model="tiny", messages=user("say:" + said), tools=[WEATHER], tool_choice="none"
    )
    assert answer.choices[0].message.content == said
    assert answer.choices[0].message.tool_calls is None


def test_answer_with_calls_can_be_sent_back(client: openai.OpenAI) -> None:
    said = 'say:<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
    first = client.chat.completions.create(model="tiny", messages=user(said), tools=[WEATHER])
    message = first.choices[0].message
    history = [
        *user(said),
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"},
        {"role": "user", "content": "say:thanks"},
    ]
    second = client.chat.completions.create(model="tiny", messages=history, tools=[WEATHER])
    assert second.choices[0].message.content == "thanks"


def test_completion_of_texts_and_of_token_ids(client: openai.OpenAI) -> None:
    texts = client.completions.create(model="tiny", prompt=["say:one", "say:two"], max_tokens=10)
    ids = client.completions.create(model="tiny", prompt=[list(b"say:one"), list(b"say:two")], max_tokens=10)
    assert [c.text for c in texts.choices] == [c.text for c in ids.choices] == ["one", "two"]
    assert client.completions.create(model="tiny", prompt=list(b"say:ids")).choices[0].text == "ids"


def test_completion_streams_what_it_returns_whole(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "max_tokens": 20, "seed": 3, "echo": True}
    whole = [c.text for c in client.completions.create(**fields).choices]
    texts = [""] * 4
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == whole


def test_prompt_can_be_scored(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="score me", echo=True, max_tokens=0, logprobs=1)
    told = answer.choices[0].logprobs
    assert "".join(told.tokens) == "score me"
    assert told.token_logprobs[0] is None
    assert all(p < 0 for p in told.token_logprobs[1:])


def test_response_format_and_vllm_fields_are_taken(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "messages": user("x"), "max_tokens": 3}
    schema: Any = {"name": "n", "schema": {"type": "object"}}
    client.chat.completions.create(**fields, response_format={"type": "json_schema", "json_schema": schema})
    client.chat.completions.create(**fields, response_format={"type": "json_object"})
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [5],
        "skip_special_tokens": False,
        "add_generation_prompt": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "guided_regex": "a+",
        "priority": 3,
        "cache_salt": "s",
    }
    answer = client.chat.completions.create(
        **fields, user="me", metadata={"a": "b"}, store=False, extra_body=extra
    )
    assert answer.choices[0].finish_reason == "length"


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=user("x"))
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="tiny", messages=user("x" * 600))
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="refuse"):
        client.chat.completions.create(model="tiny", messages=user("refuse!"), stream=True)
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="tiny", messages=user("bug!"))
    with pytest.raises(openai.InternalServerError, match="non-finite"):
        client.chat.completions.create(model="tiny", messages=user("error!"))


def test_request_that_fails_alone_leaves_others_alone(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="tiny", messages=user("x"), max_tokens=400, stream=True, seed=1
    ) as stream:
        first = next(iter(stream))
        for text in ("bug!", "error!", "refuse!"):
            with pytest.raises(openai.APIError):
                client.chat.completions.create(model="tiny", messages=user(text))
        rest = list(stream)
    assert first.id == rest[-1].id
    assert rest[-1].choices[0].finish_reason == "length"


async def test_many_async_streams_at_once_each_get_their_own_answer(shared_server: Served) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:

        async def one(k: int) -> str:
            text = ""
            stream = await client.chat.completions.create(
                model="tiny", messages=user(f"say:answer {k} " + "word " * 20), stream=True
            )
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
            return text

        answers = await asyncio.gather(*(one(k) for k in range(64)))
    assert answers == [f"answer {k} " + "word " * 20 for k in range(64)]


def test_tokenize_and_detokenize_are_inverse(shared_server: Served) -> None:
    with httpx.Client(base_url=shared_server.url) as http:
        got = http.post(
            "/tokenize", json={"model": "tiny", "prompt": "héllo", "return_token_strs": True}
        ).json()
        assert got["count"] == len(got["tokens"]) == len("héllo".encode()) == len(got["token_strs"])
        assert got["max_model_len"] == 512
        assert http.post("/detokenize", json={"tokens": got["tokens"]}).json() == {"prompt": "héllo"}
        chat = http.post("/tokenize", json={"messages": user("hi")}).json()
        text = http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_stream_on_the_wire_is_server_sent_events(shared_server: Served) -> None:
    body = {"messages": user("say:ab"), "stream": True}
    with httpx.stream("POST", f"{shared_server.url}/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = "".join(answer.iter_text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    bodies = [json.loads(e.removeprefix("data: ")) for e in events[:-2]]
    assert {b["object"] for b in bodies} == {"chat.completion.chunk"}
    assert bodies[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "usage" not in bodies[0]
