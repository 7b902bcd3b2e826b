"""Texts as models write them, good and bad, to be parsed under every split."""

import json
from typing import NamedTuple


class Case(NamedTuple):
    """A text and the message it is: content, reasoning, and calls as (name, arguments)."""

    text: str
    content: str | None
    calls: list[tuple[str, str]] = []
    reasoning: str | None = None
    thinking: bool = False


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


WEATHER = '{"city": "Jakarta", "days": [1, 2, {"x": null}], "q": "}]{\\"</tool_call>"}'

HERMES = {
    "plain text": Case("Hello there.\n", "Hello there.\n"),
    "empty": Case("", ""),
    "one call": Case(hermes("f", WEATHER), None, [("f", WEATHER)]),
    "call between text": Case(
        f"Let me see.\n{hermes('f', '{}')}\nDone.\n", "Let me see.\n\nDone.\n", [("f", "{}")]
    ),
    "two calls": Case(f"{hermes('f', '{}')}\n{hermes('g', WEATHER)}\n", None, [("f", "{}"), ("g", WEATHER)]),
    "two calls on one line": Case(hermes("f", "{}") + hermes("f", "{}"), None, [("f", "{}"), ("f", "{}")]),
    "compact": Case('<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>', None, [("f", '{"a":1}')]),
    "arguments first": Case(
        '<tool_call>{"arguments": {"a": "{"}, "name": "f"}</tool_call>', None, [("f", '{"a": "{"}')]
    ),
    "arguments as a string": Case(
        f'<tool_call>{{"name": "f", "arguments": {json.dumps(WEATHER)}}}</tool_call>', None, [("f", WEATHER)]
    ),
    "parameters instead of arguments": Case(
        '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', None, [("f", '{"a": 1}')]
    ),
    "other keys": Case(
        '<tool_call>{"type": "function", "id": 7, "name": "f", "arguments": {}, "x": [true]}</tool_call>',
        None,
        [("f", "{}")],
    ),
    "no arguments": Case('<tool_call>{"name": "f"}</tool_call>', None, [("f", "{}")]),
    "null arguments": Case('<tool_call>{"name": "f", "arguments": null}</tool_call>', None, [("f", "{}")]),
    "escapes in the name": Case(
        '<tool_call>{"name": "\\u0066\\"x", "arguments": {}}</tool_call>', None, [('f"x', "{}")]
    ),
    "unclosed tag": Case('<tool_call>\n{"name": "f", "arguments": {"a": 1}}', None, [("f", '{"a": 1}')]),
    "cut in the arguments": Case(
        'ok <tool_call>{"name": "f", "arguments": {"a": "b', "ok", [("f", '{"a": "b')]
    ),
    "brace missing": Case(
        '<tool_call>{"name": "f", "arguments": {"a": {"b": 1}\n</tool_call>after',
        "after",
        [("f", '{"a": {"b": 1}\n')],
    ),
    "outer brace missing": Case(
        '<tool_call>{"name": "f", "arguments": {}\n</tool_call>\nafter', "after", [("f", "{}")]
    ),
    "junk behind the call": Case(
        '<tool_call>{"name": "f", "arguments": {}} oops</tool_call>', "oops</tool_call>", [("f", "{}")]
    ),
    "junk behind the arguments": Case(
        '<tool_call>{"name": "f", "arguments": {} oops</tool_call>', "oops</tool_call>", [("f", "{}")]
    ),
    "bad key behind the arguments": Case(
        '<tool_call>{"name": "f", "arguments": {}, oops</tool_call>', ", oops</tool_call>", [("f", "{}")]
    ),
    "bad key, then the closing tag": Case(
        '<tool_call>{"name": "f", "arguments": {}, "k"</tool_call>x', ', "k"x', [("f", "{}")]
    ),
    "closing tag twice": Case(hermes("f", "{}") + "</tool_call>", "</tool_call>", [("f", "{}")]),
    "tag in text": Case("Write <tool_call> to call.", "Write <tool_call> to call."),
    "tag at the end": Case("Write <tool_call>", "Write <tool_call>"),
    "half a tag": Case("a <tool_ca", "a <tool_ca"),
    "half a tag, then text": Case("a <tool_cab b", "a <tool_cab b"),
    "cut before the name": Case('x\n<tool_call>\n{"na', 'x\n<tool_call>\n{"na'),
    "cut after the name": Case('<tool_call>{"name": "f"', '<tool_call>{"name": "f"'),
    "not JSON": Case("<tool_call>\nf(1)\n</tool_call>\n", "<tool_call>\nf(1)\n</tool_call>\n"),
    "single quotes": Case("<tool_call>{'name': 'f'}</tool_call>", "<tool_call>{'name': 'f'}</tool_call>"),
    "no name": Case('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>'),
    "name is a number": Case('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>'),
    "name is empty": Case(
        '<tool_call>{"name": "", "arguments": {}}', '<tool_call>{"name": "", "arguments": {}}'
    ),
    "name is an object": Case('<tool_call>{"name": {}}', '<tool_call>{"name": {}}'),
    "arguments are a list": Case(
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    ),
    "arguments are other text": Case(
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
    ),
    "bad call, then a good one": Case(
        "<tool_call>oops</tool_call>" + hermes("f", "{}"), "<tool_call>oops</tool_call>", [("f", "{}")]
    ),
    "tag inside a bad call": Case("<tool_call>\n" + hermes("f", "{}"), "<tool_call>", [("f", "{}")]),
    "thoughts": Case("<think>\nHm.\n</think>\n\nYes.", "Yes.", reasoning="Hm."),
    "thoughts, then a call": Case(
        f"<think>a\n\nb</think>\n\n{hermes('f', '{}')}", None, [("f", "{}")], "a\n\nb"
    ),
    "call inside thoughts": Case(f"<think>{hermes('f', '{}')}</think>x", "x", reasoning=hermes("f", "{}")),
    "thoughts without an end": Case("<think>Hm. </thin", "", reasoning="Hm. </thin"),
    "thoughts cut after white space": Case("<think> Hm.\n ", "", reasoning="Hm.\n "),
    "empty thoughts": Case("<think>\n\n</think>\n\nYes.", "Yes."),
    "thoughts after white space": Case("\n <think>a</think>b", "b", reasoning="a"),
    "think tag in the middle": Case("Use <think>x</think>.", "Use <think>x</think>."),
    "half a think tag": Case(" <thin", " <thin"),
    "lone end of thoughts": Case("a</think>b", "a</think>b"),
    "open thoughts": Case("Hm.\n</think>\n\nYes. ", "Yes. ", reasoning="Hm.", thinking=True),
    "open thoughts, opened again": Case("\n<think>\nHm.</think>Yes.", "Yes.", reasoning="Hm.", thinking=True),
    "open thoughts to the end": Case(" Hm.", "", reasoning="Hm.", thinking=True),
    "open thoughts, half a tag": Case("<thi", "", reasoning="<thi", thinking=True),
    "other tags": Case("a <b>c</b> < d << <t", "a <b>c</b> < d << <t"),
    "white space": Case(" \n \t", " \n \t"),
}

LLAMA = {
    "plain text": Case("Hello {there}.\n", "Hello {there}.\n"),
    "empty": Case("", ""),
    "one call": Case(llama("f", WEATHER), None, [("f", WEATHER)]),
    "white space around": Case(f"\n {llama('f', '{}')}\n\n", None, [("f", "{}")]),
    "tagged": Case("<|python_tag|>" + llama("f", "{}"), None, [("f", "{}")]),
    "tagged, spaced": Case(" <|python_tag|> " + llama("f", "{}"), None, [("f", "{}")]),
    "two calls": Case(f"{llama('f', '{}')}; {llama('g', WEATHER)}", None, [("f", "{}"), ("g", WEATHER)]),
    "two tagged calls": Case(
        f"<|python_tag|>{llama('f', '{}')};<|python_tag|>{llama('g', '{}')}", None, [("f", "{}"), ("g", "{}")]
    ),
    "with a type": Case(
        '{"type": "function", "name": "f", "parameters": {"a": -1.5e3}}', None, [("f", '{"a": -1.5e3}')]
    ),
    "parameters first": Case('{"parameters": {"a": []}, "name": "f"}', None, [("f", '{"a": []}')]),
    "arguments instead of parameters": Case('{"name": "f", "arguments": {}}', None, [("f", "{}")]),
    "cut in the parameters": Case('{"name": "f", "parameters": {"a"', None, [("f", '{"a"')]),
    "text behind": Case(llama("f", "{}") + " and so on", "and so on", [("f", "{}")]),
    "semicolon behind": Case(llama("f", "{}") + " ;", ";", [("f", "{}")]),
    "semicolon and text behind": Case(llama("f", "{}") + "; then", "; then", [("f", "{}")]),
    "second call bad": Case(llama("f", "{}") + '; {"name": 1}', '; {"name": 1}', [("f", "{}")]),
    "some other JSON": Case('{"city": "Bogor", "n": [1, {}]}\n', '{"city": "Bogor", "n": [1, {}]}\n'),
    "JSON with a name": Case('{"name": "Bob"}', '{"name": "Bob"}'),
    "JSON with a name and text": Case(
        '{"name": "Bob", "parameters": "none"}', '{"name": "Bob", "parameters": "none"}'
    ),
    "call in the middle": Case("So: " + llama("f", "{}"), "So: " + llama("f", "{}")),
    "tag before code": Case("<|python_tag|>import os\n", "<|python_tag|>import os\n"),
    "half a tag": Case("<|pyth", "<|pyth"),
    "tag alone": Case("<|python_tag|>", "<|python_tag|>"),
    "cut": Case(' {"name": "f", "par', ' {"name": "f", "par'),
    "a list": Case("[1]", "[1]"),
    "braces": Case("{}", "{}"),
    "brace": Case("{", "{"),
    "thoughts, then a call": Case(f"<think>a</think>\n{llama('f', '{}')}", None, [("f", "{}")], "a"),
    "thoughts, then text": Case("<think>a</think>\n\n {b", "{b", reasoning="a"),
    "hermes call": Case(hermes("f", "{}"), hermes("f", "{}")),
}
