"""Chat templates: where they come from, what they are given, and how their errors reach the client."""

import json
from datetime import datetime

import pytest

from kilat.base.errors import LimitError, ModelFileError, RequestError
from kilat.text.template import MAX_PROMPT_CHARS, MAX_TEMPLATE_BYTES, ChatTemplate, load_template
from kilat.text.tokenizer import Tokenizer
from tests.base.gguf_bytes import STRING, U32, GgufBytes, scalar
from tests.text.chat_templates import CHATML, DATED, LLAMA3, QWEN
from tests.text.tiny import Files, byte_level_tokenizer, write_directory

pytestmark = pytest.mark.logic
HI = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
}


def template(source: str, **options: object) -> ChatTemplate:
    return ChatTemplate(source, bos="<s>", eos="</s>", **options)


def test_chatml():
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    made = template(CHATML).render(messages)
    assert (
        made
        == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template(CHATML).render(messages, add_generation_prompt=False) == made.removesuffix(
        "<|im_start|>assistant\n"
    )


def test_bos_and_eos_reach_the_template():
    assert template("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}").render(HI) == "<s>Hi</s>"


def test_calls_and_results_are_written_as_the_model_knows_them():
    messages = [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "get_time", "arguments": '{"tz": "WIB"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "12:00"}]},
    ]
    made = template(QWEN).render(messages, tools=[TOOL])
    assert '<tool_call>\n{"name": "get_time", "arguments": {"tz": "WIB"}}\n</tool_call><|im_end|>' in made
    assert "<|im_start|>user\n<tool_response>\n12:00\n</tool_response><|im_end|>" in made
    assert json.dumps(TOOL) in made


def test_tools_are_none_without_tools():
    source = "{{ 'none' if tools is none else tools | length }}"
    assert template(source).render(HI) == template(source).render(HI, tools=[]) == "none"
    assert template(source).render(HI, tools=[TOOL]) == "1"


def test_template_for_tools_is_used_only_with_tools():
    both = template("plain", tools_source="tools")
    assert (both.render(HI), both.render(HI, tools=[TOOL])) == ("plain", "tools")
    assert (both.source, both.tools_source) == ("plain", "tools")
    assert template("one").tools_source == "one"


@pytest.mark.parametrize(
    ("source", "role"),
    [("{{ messages[0].role }}", "system"), ("{# developer #}{{ messages[0].role }}", "developer")],
)
def test_developer_is_kept_where_the_template_names_it(source, role):
    assert template(source).render([{"role": "developer", "content": "x"}]) == role


def test_time_comes_from_the_clock_it_was_given():
    made = template(DATED, now=lambda: datetime(2030, 1, 2)).render(HI)
    assert made == "Today is 02 Jan 2030.\nHi"


def test_extra_variables_reach_the_template():
    source = "{{ enable_thinking }}{{ documents | length if documents }}"
    assert template(source).render(HI, extra={"enable_thinking": False, "documents": [{"a": 1}]}) == "False1"
    assert template(source).render(HI) == ""


@pytest.mark.parametrize(
    "name", ["messages", "tools", "bos_token", "add_generation_prompt", "not a name", "a-b", ""]
)
def test_extra_variables_cannot_replace_ours(name):
    with pytest.raises(RequestError, match="chat_template_kwargs cannot set") as caught:
        template(CHATML).render(HI, extra={name: 1})
    assert caught.value.param == "chat_template_kwargs"


def test_extra_variables_are_json():
    with pytest.raises(RequestError, match=r"chat_template_kwargs\.x"):
        template(CHATML).render(HI, extra={"x": print})


def test_templates_own_words_reach_the_client():
    source = "{% if messages[0].role != 'system' %}{{ raise_exception('A system message must come first.') }}{% endif %}"
    with pytest.raises(RequestError) as caught:
        template(source).render(HI)
    assert (caught.value.message, caught.value.status) == ("A system message must come first.", 400)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ messages[0].content.x.y }}", "has no attribute 'x'"),
        ("{{ missing.x }}", "'missing' is undefined"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages['x' * 3].y }}", "has no"),
        ("{{ messages | tojson(indent='x') }}", "TypeError"),
        ("{{ ''.__class__.x }}", "unsafe"),
        ("{{ ''.ljust(3) }}", "not allowed"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ {[]: 1} }}", "unhashable"),
    ],
)
def test_failing_template_is_an_error_of_the_request(source, told):
    with pytest.raises(RequestError, match=told):
        template(source).render(HI)


def test_error_text_is_limited():
    with pytest.raises(RequestError) as caught:
        template("{{ raise_exception(messages[0].content) }}").render(
            [{"role": "user", "content": "x" * 100_000}]
        )
    assert len(caught.value.message) == 2000


def test_too_much_work_is_an_error_of_the_request():
    source = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    with pytest.raises(LimitError, match="too much work"):
        template(source).render(HI)


def test_too_long_prompt_is_refused():
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    message = {"role": "user", "content": "x" * (MAX_PROMPT_CHARS // 4)}
    assert len(template(source).render([message] * 4)) == MAX_PROMPT_CHARS
    with pytest.raises(LimitError, match="4000000 characters"):
        template(source).render([message] * 5)


def test_template_can_be_used_again_after_an_error():
    made = template("{{ messages[0].content }}{{ raise_exception('no') if messages | length > 1 }}")
    with pytest.raises(RequestError):
        made.render(HI * 2)
    assert made.render(HI) == "Hi"


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ 1 +",
        "{% for %}",
        "{% nonsense %}",
        "{{ x | nonsense }}",
        "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
        "{{ 1" + "0" * 5000 + " }}",
    ],
)
def test_template_that_is_not_jinja_is_a_damaged_model_file(source):
    with pytest.raises(ModelFileError, match="chat template"):
        template(source)


def test_template_over_the_limit_is_refused():
    assert template("x" * MAX_TEMPLATE_BYTES).render(HI)
    for source in ("x" * (MAX_TEMPLATE_BYTES + 1), "é" * (MAX_TEMPLATE_BYTES // 2 + 1)):
        with pytest.raises(ModelFileError, match="limit 262144"):
            template(source)


def test_wrong_messages_are_refused_before_rendering():
    with pytest.raises(RequestError, match=r"messages\[0\]\.role"):
        template(CHATML).render([{"role": "robot", "content": "x"}])


def test_text_of_messages_is_no_template():
    assert (
        template(CHATML)
        .render([{"role": "user", "content": "{{ 1 + 1 }}{% if %}"}])
        .count("{{ 1 + 1 }}{% if %}")
        == 1
    )


def test_llama3_style():
    made = template(LLAMA3).render([{"role": "system", "content": " S "}, {"role": "user", "content": "Hi "}])
    assert made == (
        "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def directory(tmp_path, config: dict[str, object]) -> ChatTemplate | None:
    files = write_directory(
        tmp_path, byte_level_tokenizer(), {"bos_token": "<|start|>", "eos_token": "<|end|>", **config}
    )
    return load_template(files, _tokenizer(files))


def _tokenizer(files: Files) -> Tokenizer:
    return Tokenizer.from_files(files)


def test_template_of_tokenizer_config_is_loaded_with_its_tokens(tmp_path):
    made = directory(tmp_path, {"chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"})
    assert made.render(HI) == "<|start|>Hi<|end|>"


def test_list_of_templates_is_taken_by_name(tmp_path):
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
        {"name": "rag", "template": "x"},
    ]
    made = directory(tmp_path, {"chat_template": named})
    assert (made.render(HI), made.render(HI, tools=[TOOL])) == ("plain", "tools")


def test_list_without_default_is_no_template(tmp_path):
    assert directory(tmp_path, {"chat_template": [{"name": "rag", "template": "x"}]}) is None


def test_template_file_goes_before_the_config(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("from the file {{ messages[0].content }}")
    assert directory(tmp_path, {"chat_template": "from the config"}).render(HI) == "from the file Hi"


def test_template_file_must_be_text(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelFileError, match=r"chat_template\.jinja"):
        directory(tmp_path, {})


def test_model_without_template_has_none(tmp_path):
    assert directory(tmp_path, {}) is None


@pytest.mark.parametrize("value", [5, [1], [{"name": 3}]])
def test_template_of_another_type_is_refused(value, tmp_path):
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json"):
        directory(tmp_path, {"chat_template": value})


def gguf(tmp_path, *keys: tuple[str, bytes]) -> ChatTemplate | None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(GgufBytes(keys=list(keys)).build())
    return load_template(Files("gguf", path), byte_level_tokenizer())


def test_template_of_a_gguf_file_is_loaded(tmp_path):
    made = gguf(
        tmp_path,
        ("tokenizer.chat_template", scalar(STRING, "{{ bos_token }} {{ messages[0].content }}")),
        ("tokenizer.chat_template.tool_use", scalar(STRING, "tools")),
    )
    assert (made.render(HI), made.render(HI, tools=[TOOL])) == ("<|start|> Hi", "tools")


def test_gguf_file_without_template_has_none(tmp_path):
    assert gguf(tmp_path, ("general.architecture", scalar(STRING, "llama"))) is None


def test_gguf_template_that_is_no_text_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match="chat_template is not text"):
        gguf(tmp_path, ("tokenizer.chat_template", scalar(U32, 7)))


def test_model_without_bos_gives_an_empty_bos(tmp_path):
    files = write_directory(tmp_path, byte_level_tokenizer(), {"chat_template": "[{{ bos_token }}]"})
    assert load_template(files, _tokenizer(files)).render(HI) == "[]"
