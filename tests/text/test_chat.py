"""Messages and tools are checked and brought into the form that templates are written for."""

import pytest

from kilat.base.errors import LimitError, RequestError
from kilat.text.chat import check_messages, check_tools, plain

pytestmark = pytest.mark.logic


def one(**message: object) -> dict[str, object]:
    return check_messages([message])[0]


def call(arguments: object = "{}", **more: object) -> dict[str, object]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}, **more}


def test_plain_message_stays_as_it_is():
    message = {"role": "user", "content": "Hi"}
    assert check_messages([message]) == [message]


def test_messages_are_copied():
    arguments = {"a": [1]}
    messages = [{"role": "assistant", "tool_calls": [call(arguments)]}]
    made = check_messages(messages)
    made[0]["tool_calls"][0]["function"]["arguments"]["a"].append(2)
    assert arguments == {"a": [1]}


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_known_roles_are_kept(role):
    assert one(role=role, content="x")["role"] == role


def test_developer_is_system_where_the_template_does_not_know_it():
    message = {"role": "developer", "content": "x"}
    assert check_messages([message])[0]["role"] == "system"
    assert check_messages([message], keep_developer=True)[0]["role"] == "developer"


def test_text_parts_become_lines():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert one(role="user", content=parts)["content"] == "a\nb"
    assert one(role="user", content=[])["content"] == ""


def test_fields_that_are_null_or_without_meaning_are_left_out():
    made = one(
        role="assistant",
        content="x",
        name=None,
        tool_calls=None,
        refusal=None,
        audio={"id": 1},
        annotations=[],
    )
    assert made == {"role": "assistant", "content": "x"}


def test_names_and_ids_are_kept():
    made = one(role="tool", content="5", tool_call_id="c1", name="f")
    assert made == {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "f"}


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_goes_by_the_name_that_templates_read(field):
    assert one(role="assistant", content="x", **{field: "hm"})["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}), ({"a": 1}, {"a": 1}), ("{}", {}), ("", {})],
)
def test_arguments_of_calls_become_objects(arguments, expected):
    made = one(role="assistant", content=None, tool_calls=[call(arguments)])
    assert "content" not in made
    assert made["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": expected}}
    ]


def test_call_needs_no_id():
    made = one(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])
    assert made["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]


def test_empty_list_of_calls_is_none():
    assert one(role="assistant", content="x", tool_calls=[]) == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        (None, "messages is missing"),
        ([], "at least one message"),
        ("hi", "of type str"),
        ({"role": "user"}, "of type dict"),
        (["hi"], r"messages\[0\] is of type str"),
        ([{"content": "x"}], r"messages\[0\]\.role is None"),
        ([{"role": "robot", "content": "x"}], "allowed are system, developer"),
        ([{"role": ["user"], "content": "x"}], "role is"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], r"messages\[1\] has no content"),
        ([{"role": "assistant"}], "no content or tool_calls"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content is of type int"),
        ([{"role": "user", "content": {"text": "x"}}], "of type dict"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] is of type str"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "'image_url': only text parts",
        ),
        ([{"role": "user", "content": [{"text": "x"}]}], "only text parts"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text is missing"),
        ([{"role": "user", "content": "x", "name": 5}], r"messages\[0\]\.name is of type int"),
        ([{"role": "user", "content": "x", "tool_calls": [call()]}], "only an assistant"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], "tool_calls is of type dict"),
        ([{"role": "assistant", "tool_calls": ["f"]}], r"tool_calls\[0\]\.function is missing"),
        ([{"role": "assistant", "tool_calls": [{"function": "f"}]}], "function is of type str"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "name is missing"),
        ([{"role": "assistant", "tool_calls": [call("{")]}], r"function\.arguments is not JSON"),
        ([{"role": "assistant", "tool_calls": [call("[1]")]}], "wanted a JSON object"),
        ([{"role": "assistant", "tool_calls": [call(None)]}], "arguments is missing"),
        ([{"role": "assistant", "tool_calls": [call("[" * 10_000)]}], "arguments is not JSON"),
        ([{"role": "assistant", "tool_calls": [call(id=5)]}], "id is of type int"),
    ],
)
def test_wrong_messages_are_named(messages, told):
    with pytest.raises(RequestError, match=told) as caught:
        check_messages(messages)
    assert caught.value.param == "messages"
    assert caught.value.status == 400


TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
}


@pytest.mark.parametrize("tools", [None, []])
def test_no_tools_are_none(tools):
    assert check_tools(tools) is None


def test_tools_are_copied_as_they_are():
    made = check_tools([TOOL, {"function": {"name": "g"}}])
    assert made == [TOOL, {"function": {"name": "g"}}]
    assert made[0]["function"] is not TOOL["function"]
    assert list(made[0]["function"]) == ["name", "description", "parameters", "strict"]


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        ("f", "of type str"),
        ({"a": 1}, "of type dict"),
        (["f"], r"tools\[0\] is not"),
        ([{"type": "web_search"}], "all that is supported"),
        ([{"type": "function"}], "function is missing"),
        ([{"function": {}}], "name is missing"),
        ([{"function": {"name": ""}}], "needs a name"),
        ([{"function": {"name": 5}}], "name is of type int"),
        ([{"function": {"name": "f", "parameters": "x"}}], "JSON schema"),
        (
            [TOOL, {"function": {"name": "f", "parameters": {"x": object()}}}],
            r"tools\[1\] holds of type object",
        ),
    ],
)
def test_wrong_tools_are_named(tools, told):
    with pytest.raises(RequestError, match=told) as caught:
        check_tools(tools)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("value", [1, 1.5, "x", True, None, [1, [2]], {"a": {"b": []}}])
def test_json_is_copied(value):
    assert plain(value, "x") == value


def test_tuples_become_lists():
    assert plain((1, (2,)), "x") == [1, [2]]


@pytest.mark.parametrize("value", [object(), b"x", {1: 2}, [{"a": {1, 2}}], lambda: 1])
def test_anything_but_json_is_refused(value):
    with pytest.raises(RequestError, match="extra"):
        plain(value, "extra")


def test_subclass_of_a_string_is_refused_because_it_may_do_anything():
    class Odd(str):
        pass

    with pytest.raises(RequestError, match="Odd"):
        plain(Odd("x"), "extra")


def test_depth_is_limited():
    value: object = 1
    for _ in range(64):
        value = [value]
    assert plain(value, "x") == value
    with pytest.raises(LimitError, match="64 levels"):
        plain([value], "x")


def test_param_is_the_field_of_the_request():
    with pytest.raises(LimitError) as caught:
        plain(_deep(100), "tools[3]")
    assert caught.value.param == "tools"


def _deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = {"a": value}
    return value
