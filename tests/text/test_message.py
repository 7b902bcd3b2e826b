"""Any split of any text gives the same message, and no word of it is lost or doubled."""

import random
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.text.deltas import Content, Message, Reasoning, ToolArguments, ToolStart, assemble
from kilat.text.message import MessageParser, detect_style, opens_thinking
from tests.text.transcripts import HERMES, LLAMA, Case, hermes, llama

pytestmark = pytest.mark.logic

CASES = [pytest.param("hermes", case, id=f"hermes: {name}") for name, case in HERMES.items()]
CASES += [pytest.param("llama", case, id=f"llama: {name}") for name, case in LLAMA.items()]


def parse(
    pieces: list[str] | str, style: str | None, *, tools: bool = True, thinking: bool = False
) -> Message:
    """The message that these pushes make."""
    parser = MessageParser(style, tools=tools, thinking=thinking, seed="s")
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return assemble(deltas + parser.finish())


def cut(text: str, places: list[int]) -> list[str]:
    """``text`` cut at these places."""
    ends = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in pairwise(ends)]


@pytest.mark.parametrize(("style", "case"), CASES)
def test_text_in_one_push_is_the_expected_message(style, case: Case):
    message = parse([case.text], style, thinking=case.thinking)
    assert message.content == case.content
    assert message.reasoning == case.reasoning
    assert [(call.name, call.arguments) for call in message.tool_calls] == case.calls


@pytest.mark.parametrize(("style", "case"), CASES)
def test_two_pushes_cut_anywhere_give_the_same_message(style, case: Case):
    whole = parse([case.text], style, thinking=case.thinking)
    for at in range(len(case.text) + 1):
        pieces = [case.text[:at], case.text[at:]]
        assert parse(pieces, style, thinking=case.thinking) == whole, pieces


@pytest.mark.parametrize(("style", "case"), CASES)
def test_one_push_per_character_gives_the_same_message(style, case: Case):
    whole = parse([case.text], style, thinking=case.thinking)
    assert parse(list(case.text), style, thinking=case.thinking) == whole


@pytest.mark.parametrize(("style", "case"), CASES)
def test_random_cuts_and_empty_pushes_give_the_same_message(style, case: Case):
    whole, chance = parse([case.text], style, thinking=case.thinking), random.Random(case.text)
    for _ in range(50):
        places = [chance.randrange(len(case.text) + 1) for _ in range(chance.randrange(8))]
        pieces = [piece for part in cut(case.text, places) for piece in (part, "")]
        assert parse(pieces, style, thinking=case.thinking) == whole, pieces


FRAGMENTS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<think>",
            "</think>",
            "<|python_tag|>",
            "<",
            "</",
            "{",
            "}",
            "[",
            "]",
            ":",
            ",",
            ";",
        ),
        *(
            '"name"',
            '"f"',
            '"arguments"',
            '"parameters"',
            '"x"',
            '"',
            "\\",
            '\\"',
            "1",
            "null",
            "{}",
            " ",
            "\n",
            "word",
            "é🙂",
        ),
        *('{"name": "f", "arguments": ', '"name": "f"', hermes("f", "{}"), llama("f", '{"a": 1}')),
    ]
)
TRANSCRIPTS = st.lists(FRAGMENTS, max_size=14).map("".join)
STYLES = st.sampled_from(["hermes", "llama", None])
PLACES = st.lists(st.integers(0, 200), max_size=12)


@given(text=TRANSCRIPTS, style=STYLES, places=PLACES, thinking=st.booleans())
def test_any_split_of_any_text_gives_the_same_message(text, style, places, thinking):
    whole = parse([text], style, thinking=thinking)
    assert parse(cut(text, places), style, thinking=thinking) == whole
    assert parse(list(text), style, thinking=thinking) == whole


@given(text=TRANSCRIPTS, style=STYLES)
def test_text_without_calls_and_thoughts_is_content_word_for_word(text, style):
    message = parse([text], style)
    if not message.tool_calls and not text.lstrip().startswith("<think>"):
        assert message.content == text


@given(text=TRANSCRIPTS, style=STYLES, thinking=st.booleans())
def test_every_part_of_a_message_stands_in_the_text_in_order(text, style, thinking):
    message = parse([text], style, thinking=thinking)
    letters = iter(text)
    assert all(letter in letters for letter in message.content or "")
    letters = iter(text)
    assert all(letter in letters for letter in message.reasoning or "")
    for call in message.tool_calls:
        assert call.arguments in text or call.arguments == "{}"


def segment(kind: str, word: str) -> str:
    """A part of a transcript with ``word`` in it once, where no part of the format can hide it."""
    return {
        "prose": f" {word} ",
        "line": f"{word}\n",
        "call": hermes("f", f'{{"a": "{word}"}}'),
        "nested": hermes("f", f'{{"a": [{{"{word}": "}}<tool_call>"}}]}}'),
        "late name": f'<tool_call>{{"arguments": {{"a": "{word}"}}, "name": "g"}}</tool_call>',
        "not JSON": f"<tool_call>{word}</tool_call>",
        "no name": f'<tool_call>{{"arguments": {{"a": "{word}"}}}}</tool_call>',
        "odd name": f'<tool_call>{{"name": ["{word}"]}}</tool_call>',
        "list": f'<tool_call>{{"name": "f", "arguments": ["{word}"]}}</tool_call>',
        "junk inside": f'<tool_call>{{"name": "f", "arguments": {{}} {word}}}</tool_call>',
        "junk behind": f'<tool_call>{{"name": "f", "arguments": {{}}}} {word}</tool_call>',
        "unclosed": f'<tool_call>{{"name": "f", "arguments": {{"a": {{"b": "{word}"}}\n</tool_call>',
        "open tag": f"<tool_call>\n{word}",
        "close tag": f"</tool_call>{word}",
    }[kind]


KINDS = (
    "prose,line,call,nested,late name,not JSON,no name,odd name,list,junk inside,junk behind,unclosed,open tag,close tag"
).split(",")


@given(kinds=st.lists(st.sampled_from(KINDS), max_size=8), think=st.booleans(), places=PLACES)
def test_no_word_is_lost_or_doubled(kinds, think, places):
    words = [f"w{n}x" for n in range(len(kinds) + think)]
    text = f"<think>{words[-1]}</think>" if think else ""
    text += "".join(segment(kind, word) for kind, word in zip(kinds, words))
    message = parse(cut(text, places), "hermes")
    told = " ".join(
        [message.content or "", message.reasoning or "", *(c.arguments for c in message.tool_calls)]
    )
    assert sorted(re.findall(r"w\d+x", told)) == sorted(words)


@pytest.mark.parametrize("style", ["hermes", "llama"])
def test_without_tools_calls_are_text(style):
    text = hermes("f", "{}") if style == "hermes" else llama("f", "{}")
    assert parse([text], style, tools=False) == Message(text, None, ())


def test_thoughts_are_told_apart_without_tools_too():
    assert parse(["<think>a</think>b"], None, tools=False) == Message("b", "a", ())


def deltas_of(pieces: list[str], style: str = "hermes") -> list[list[object]]:
    parser = MessageParser(style, tools=True, seed="s")
    return [*(parser.push(piece) for piece in pieces), parser.finish()]


def test_name_comes_with_the_first_brace_of_the_arguments():
    got = deltas_of(
        [
            '<tool_call>\n{"name": "get',
            '_time", "argum',
            'ents": ',
            "{",
            '"tz": "WI',
            'B"}',
            "}\n</tool_call>",
        ]
    )
    started = ToolStart(0, MessageParser("hermes", tools=True, seed="s")._call_id(), "get_time")
    assert got == [
        [],
        [],
        [],
        [started, ToolArguments(0, "{")],
        [ToolArguments(0, '"tz": "WI')],
        [ToolArguments(0, 'B"}')],
        [],
        [],
    ]


def test_llama_arguments_stream_too():
    got = deltas_of(['{"name": "f", "parameters": {"a"', ": 1", "}", "}"], "llama")
    assert [[type(delta) for delta in deltas] for deltas in got] == [
        [ToolStart, ToolArguments],
        [ToolArguments],
        [ToolArguments],
        [],
        [],
    ]


def test_plain_text_is_passed_on_at_once():
    for style in (None, "llama"):
        assert deltas_of(["Hi", " there", ".\n"], style)[:3] == [
            [Content("Hi")],
            [Content(" there")],
            [Content(".\n")],
        ]


def test_text_that_may_become_a_call_waits_only_for_its_white_space():
    assert deltas_of(["Hi ", "there", "\n", "<", "b"]) == [
        [Content("Hi")],
        [Content(" there")],
        [],
        [],
        [Content("\n<b")],
        [],
    ]


def test_thoughts_are_passed_on_at_once():
    assert deltas_of(["<think>\n", "Hm", ", ok", "</think>", "\n\n", "Yes"]) == [
        [],
        [Reasoning("Hm")],
        [Reasoning(", ok")],
        [],
        [],
        [Content("Yes")],
        [],
    ]


def test_one_push_joins_neighbours_of_one_kind():
    parser = MessageParser("hermes", tools=True, seed="s")
    first, *rest = parser.push("a < b <tool_call>x " + hermes("f", '{"a": 1}'))
    assert first == Content("a < b <tool_call>x")
    assert [type(delta) for delta in rest] == [ToolStart, ToolArguments]


def test_calls_are_numbered_and_have_ids_of_their_own():
    message = parse([hermes("f", "{}") * 3], "hermes")
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == 3 and all(re.fullmatch("call_[0-9a-f]{24}", i) for i in ids)


def test_ids_of_calls_are_a_function_of_the_seed():
    def ids(seed: str | None) -> list[str]:
        parser = MessageParser("hermes", tools=True, seed=seed)
        deltas = parser.push(hermes("f", "{}") * 2) + parser.finish()
        return [call.id for call in assemble(deltas).tool_calls]

    assert ids("a") == ids("a")
    assert len({*ids("a"), *ids("b"), *ids(None), *ids(None)}) == 8


def test_long_bad_call_is_given_back_whole():
    text = '<tool_call>{"name": "' + "x" * 10_000
    assert parse(cut(text, list(range(0, 10_000, 7))), "hermes").content == text


def test_name_over_the_limit_is_no_name():
    text = hermes("x" * 257, "{}")
    assert parse([text], "hermes") == Message(text, None, ())
    assert parse([hermes("x" * 256, "{}")], "hermes").tool_calls[0].name == "x" * 256


def test_deep_arguments_are_only_text():
    arguments = '{"a":' * 20_000 + "1" + "}" * 20_000
    assert parse([hermes("f", arguments)], "hermes").tool_calls[0].arguments == arguments


def test_deep_arguments_in_a_string_are_no_error():
    text = '<tool_call>{"name": "f", "arguments": "' + "{" * 5_000 + '"}</tool_call>'
    assert parse([text], "hermes").content == text


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{{ '<tool_call>\n' }}{{ call | tojson }}{{ '\n</tool_call>' }}", "hermes"),
        ("<tool_call>{{ name }}<arg_key>", None),
        ("<tool_call>\n<function={{ name }}>", None),
        ("{{ '<|python_tag|>' }}", "llama"),
        ("<|start_header_id|>{{ '\"parameters\": ' }}", "llama"),
        ("{{ message.content }}", None),
        ("", None),
    ],
)
def test_style_is_read_off_the_template(template, style):
    assert detect_style(template) == style


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<think>", True),
        ("<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_prompt_that_ends_in_an_open_tag_opens_the_thoughts(prompt, opens):
    assert opens_thinking(prompt) == opens
