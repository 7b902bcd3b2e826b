"""Fields of a request as sampling parameters, and the one grammar it may have."""

from typing import Any

import msgspec
import pytest

from kilat.base.errors import LimitError, RequestError
from kilat.cluster.gateway.params import chat_params, completion_params, offered_tools
from kilat.cluster.gateway.protocol import ChatRequest, CompletionRequest, parse
from kilat.wire.sampling import Grammar, SamplingParams

pytestmark = pytest.mark.logic

VOCAB = 1000
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def ask(**fields: Any) -> ChatRequest:
    return parse(msgspec.json.encode({"messages": [{"role": "user", "content": "x"}], **fields}), ChatRequest)


def chat(**fields: Any) -> SamplingParams:
    return chat_params(ask(**fields), vocab_size=VOCAB)


def completion(**fields: Any) -> SamplingParams:
    return completion_params(
        parse(msgspec.json.encode({"prompt": "x", **fields}), CompletionRequest), vocab_size=VOCAB
    )


def schema_of(params: SamplingParams) -> Any:
    assert params.grammar is not None and params.grammar.kind == "json_schema"
    return msgspec.json.decode(params.grammar.text)


def test_defaults_are_those_of_sampling_params_with_a_drawn_seed() -> None:
    params = chat()
    assert params.seed is not None
    assert msgspec.structs.replace(params, seed=None) == SamplingParams()
    assert chat().seed != params.seed


def test_every_sampling_field_arrives() -> None:
    params = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={"5": -1.5},
        seed=-7,
        n=3,
        max_tokens=50,
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[9],
        include_stop_str_in_output=True,
        ignore_eos=True,
        logprobs=True,
        top_logprobs=4,
        prompt_logprobs=2,
    )
    assert params == SamplingParams(
        temperature=0.5,
        top_k=40,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={5: -1.5},
        seed=-7,
        n=3,
        max_tokens=50,
        min_tokens=2,
        stop=("a", "b"),
        include_stop=True,
        stop_token_ids=(9,),
        ignore_eos=True,
        logprobs=4,
        prompt_logprobs=2,
    )


def test_stop_may_be_one_string() -> None:
    assert chat(stop="END").stop == ("END",)


def test_max_completion_tokens_goes_before_max_tokens() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7


def test_top_k_minus_one_is_off_as_in_vllm() -> None:
    assert chat(top_k=-1).top_k == 0


def test_text_completion_generates_sixteen_tokens_unless_asked() -> None:
    assert completion().max_tokens == 16
    assert completion(max_tokens=3).max_tokens == 3


def test_echo_with_no_tokens_scores_the_prompt() -> None:
    params = completion(echo=True, max_tokens=0, logprobs=2)
    assert (params.max_tokens, params.prompt_logprobs) == (1, 2)
    with pytest.raises(LimitError):
        completion(max_tokens=0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1000": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"stop_token_ids": [1000]}, "stop_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"guided_json": "not json"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a" * 3000}, "grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        ({"tools": [{"type": "function", "function": {"name": "has space"}}]}, "tools"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": [CLOCK]}, "tool_choice"),
        ({"tool_choice": {"function": {"name": "none"}}, "tools": [CLOCK]}, "tool_choice"),
    ],
)
def test_value_out_of_range_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as e:
        chat(**fields)
    assert e.value.param == param


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a","b"]')),
        ({"structured_outputs": {"grammar": "start: x"}}, Grammar("ebnf", "start: x")),
        ({"guided_regex": "b+"}, Grammar("regex", "b+")),
        ({"guided_choice": ["x"]}, Grammar("choice", '["x"]')),
        ({"guided_grammar": "start: y"}, Grammar("ebnf", "start: y")),
        ({"guided_json": {"type": "object"}}, Grammar("json_schema", '{"type":"object"}')),
        ({"guided_json": '{"type": "object"}'}, Grammar("json_schema", '{"type":"object"}')),
        ({"structured_outputs": {"json": {"type": "object"}}}, Grammar("json_schema", '{"type":"object"}')),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "array"}},
                }
            },
            Grammar("json_schema", '{"type":"array"}'),
        ),
    ],
)
def test_each_way_to_ask_for_a_format_gives_its_grammar(
    fields: dict[str, Any], grammar: Grammar | None
) -> None:
    assert chat(**fields).grammar == grammar


def test_two_formats_at_once_are_refused() -> None:
    with pytest.raises(RequestError, match="guided_regex and response_format"):
        chat(response_format={"type": "json_object"}, guided_regex="a")


def test_no_tools_are_offered_when_tool_choice_is_none() -> None:
    assert offered_tools(ask(tools=[CLOCK], tool_choice="none")) == []
    assert len(offered_tools(ask(tools=[CLOCK]))) == 1
    assert len(offered_tools(ask(tools=[CLOCK], tool_choice="auto"))) == 1


def test_tools_with_one_name_are_refused() -> None:
    with pytest.raises(RequestError, match="same name"):
        offered_tools(ask(tools=[CLOCK, CLOCK]))


def test_named_tool_forces_its_call() -> None:
    schema = schema_of(
        chat(tools=[WEATHER, CLOCK], tool_choice={"type": "function", "function": {"name": "get_weather"}})
    )
    assert schema["properties"]["name"] == {"const": "get_weather"}
    assert schema["properties"]["parameters"] == WEATHER["function"]["parameters"]
    assert list(schema["properties"]) == ["name", "parameters"], (
        "the name must come first, so that it can be streamed"
    )
    assert schema["required"] == ["name", "parameters"]


def test_required_tool_choice_allows_a_call_of_any_tool() -> None:
    schema = schema_of(chat(tools=[WEATHER, CLOCK], tool_choice="required"))
    assert [s["properties"]["name"]["const"] for s in schema["anyOf"]] == ["get_weather", "clock"]


def test_forced_call_and_response_format_exclude_each_other() -> None:
    with pytest.raises(RequestError) as e:
        chat(tools=[CLOCK], tool_choice="required", response_format={"type": "json_object"})
    assert e.value.param == "tool_choice"


def test_definitions_of_a_tool_move_to_the_root_where_references_find_them() -> None:
    def tool(name: str, definition: dict[str, Any]) -> dict[str, Any]:
        parameters = {
            "type": "object",
            "properties": {"p": {"$ref": "#/$defs/P"}},
            "$defs": {"P": definition},
        }
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    one, same, other = (
        tool("one", {"type": "string"}),
        tool("same", {"type": "string"}),
        tool("other", {"type": "null"}),
    )
    schema = schema_of(chat(tools=[one, same], tool_choice="required"))
    assert schema["$defs"] == {"P": {"type": "string"}}
    assert "$defs" not in schema["anyOf"][0]["properties"]["parameters"]
    with pytest.raises(RequestError, match="differently"):
        chat(tools=[one, other], tool_choice="required")
