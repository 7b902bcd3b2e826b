"""Messages as templates expect them, and prompts as token ids."""

import asyncio
import threading
from typing import Any

import pytest
from tiny_model import IM_START, TinyFiles

from kilat.base.errors import LimitError, RequestError
from kilat.cluster.gateway.prompt import INLINE_BYTES, Dialogue, PromptBuilder, split_prompts
from kilat.text.template import load_template
from kilat.text.tokenizer import Tokenizer

pytestmark = pytest.mark.logic


USER = {"role": "user", "content": "hello"}


@pytest.fixture
def builder(tiny: TinyFiles) -> PromptBuilder:
    tokenizer = Tokenizer.from_files(tiny)
    return PromptBuilder(tokenizer, load_template(tiny, tokenizer))


async def render(builder: PromptBuilder, *raw: dict[str, Any], **options: Any) -> list[int]:
    defaults: dict[str, Any] = {
        "tools": [],
        "add_generation_prompt": True,
        "add_special": False,
        "arguments": {},
    }
    talk = Dialogue(list(raw), **{**defaults, **options})
    return (await builder.chat(talk, size_bytes=sum(len(m["content"]) for m in raw))).ids


async def test_conversation_becomes_ids_with_its_special_tokens(builder: PromptBuilder) -> None:
    ids = await render(builder, USER)
    assert ids.count(IM_START) == 2
    assert builder.tokenizer.decode(ids, skip_special=False) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_generation_prompt_can_be_left_out(builder: PromptBuilder) -> None:
    assert (await render(builder, USER, add_generation_prompt=False)).count(IM_START) == 1


async def test_long_conversation_is_handled_in_a_thread_and_gives_the_same(builder: PromptBuilder) -> None:
    seen: list[str] = []
    encode = builder.tokenizer.encode

    class Watched:
        def encode(self, text: str, *, add_special: bool) -> list[int]:
            seen.append(threading.current_thread().name)
            return encode(text, add_special=add_special)

    watched = PromptBuilder(Watched(), builder.template)  # type: ignore[arg-type]
    short, long = {"role": "user", "content": "x"}, {"role": "user", "content": "x" * (INLINE_BYTES + 1)}
    await render(watched, short)
    ids = await render(watched, long)
    watched.close()
    assert seen[0] == threading.main_thread().name
    assert seen[1].startswith("prompt")
    assert ids == encode(
        f"<|im_start|>user\n{'x' * (INLINE_BYTES + 1)}<|im_end|>\n<|im_start|>assistant\n", add_special=False
    )


async def test_event_loop_goes_on_while_a_long_text_is_tokenized(
    builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticked = threading.Event()
    encode = builder.tokenizer.encode

    def when_ticked(text: str, *, add_special: bool) -> list[int]:
        assert ticked.wait(10), "the event loop stands still"
        return encode(text, add_special=add_special)

    monkeypatch.setattr(builder.tokenizer, "encode", when_ticked)
    asyncio.get_running_loop().call_soon(ticked.set)
    ids = await builder.texts(["word " * 50_000], add_special=False)
    assert len(ids[0]) == 250_000


async def test_model_without_template_says_where_to_go(tiny: TinyFiles) -> None:
    with pytest.raises(RequestError, match="/v1/completions"):
        await render(PromptBuilder(Tokenizer.from_files(tiny), None), USER)


async def test_messages_that_the_template_does_not_take_are_refused(builder: PromptBuilder) -> None:
    with pytest.raises(RequestError) as e:
        await render(builder, {"role": "robot", "content": "x"})
    assert e.value.param == "messages"


@pytest.mark.parametrize(
    "arguments",
    [
        {"messages": "x"},
        {"bos_token": "x"},
        {"not a name": 1},
        {"long": "x" * 2000},
        {f"n{i}": i for i in range(40)},
    ],
)
async def test_template_arguments_are_few_short_and_named_harmlessly(
    builder: PromptBuilder, arguments: dict[str, Any]
) -> None:
    with pytest.raises(RequestError) as e:
        await render(builder, USER, arguments=arguments)
    assert e.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("prompt", "split"),
    [
        ("a", (["a"], [])),
        (["a", "b"], (["a", "b"], [])),
        ([1, 2], ([], [[1, 2]])),
        ([[1], [2, 3]], ([], [[1], [2, 3]])),
    ],
)
def test_prompt_may_be_texts_or_ids(prompt: Any, split: Any) -> None:
    assert split_prompts(prompt) == split


@pytest.mark.parametrize("prompt", [[], ["a", 1], [1, [2]], ["a", [1]]])
def test_mixed_or_empty_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(RequestError):
        split_prompts(prompt)


def test_too_many_prompts_are_refused() -> None:
    with pytest.raises(LimitError):
        split_prompts(["a"] * 257)
