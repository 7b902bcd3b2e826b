"""Ids, text and prompts are those of transformers, on the real models where they are in the cache, and on other templates.

transformers cuts text for the GGUF name ``smollm`` as for GPT-2, and does not compose Unicode for ``qwen2``; the models' own
tokenizer.json do cut digits one by one, and do compose. The twin here is transformers' tokenizer with these two things put right.
"""

import json
import random
from pathlib import Path

import pytest
import transformers
from tokenizers import normalizers, pre_tokenizers

from kilat.base import env
from kilat.text.detokenize import StreamDetokenizer
from kilat.text.template import ChatTemplate, load_template
from kilat.text.tokenizer import Tokenizer
from tests.text import chat_templates
from tests.text.tiny import Files, byte_level_tokenizer, sentencepiece_tokenizer, write_directory

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(600)]
MODELS = ["smollm2", "qwen2.5-coder-0.5b"]

TEXTS = [
    "",
    "Hello world",
    "  two spaces before, one behind ",
    "tabs\t\tand\r\nlines\n\n\n  end\n",
    "I'll, we've, they'RE, can't, o'clock, 's",
    "0 12 345 6789 1,234.56 3.14e-10 0xFF ½ ² ٣٤ 10_000",
    "a   7 and\n 8 and\t9",
    "def f(x: int) -> list[int]:\n    return [i**2 for i in range(x)]  # squares\n\n\nprint(f(10))\n",
    '{"name": "get_time", "arguments": {"tz": "Asia/Jakarta", "n": [1, -2.5e3, null]}}',
    "<html><body class='x'>&nbsp;</body></html> a<b && c>d || !e ~f ^g @h #i $j %k",
    "naïve café e\u0301 ﬁ Å Å İstanbul straße",
    "Привет, мир! Καλημέρα. שלום עולם مرحبا नमस्ते สวัสดี こんにちは 你好，世界。안녕하세요",
    "🙂 👍🏽 👩‍👩‍👧‍👦 🇮🇩 ❤️ 🏴󠁧󠁢󠁥󠁮󠁧󠁿 ✓ ∑ ∞ ≠",
    "\u00a0nbsp\u2003em\u200bzero\ufeffbom\u2028line\u3000wide",
    "\x00\x01\x1f\x7f\x80\x9f",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><|im_end|> <|im_end|>x<|im_end|>\n<|im_end",
    "<tool_call>\n{}\n</tool_call><think>a</think>",
    "a" * 500,
    " " * 300,
    "\n" * 100 + "x" + " \n" * 50,
    "CamelCaseWords snake_case_words kebab-case-words SCREAMING_CASE",
    "https://example.com/path?q=1&r=%20#frag me@example.com",
    "\U000e0001\U0010ffff\ud7ff\ue000",
]


def random_texts(n: int) -> list[str]:
    """Strings over alphabets that meet the edges of the cuts."""
    chance = random.Random(20240203)
    alphabets = [
        " \n\t1a'sA.",
        "ab é日🙂\n",
        "<|im_start|>_end",
        "0123456789 .,",
        "'lLvVrReE sStTdDmM",
        "\u0301eé\u00a0\u3000 x",
        "()[]{};:\n\n  a",
    ]
    made = ["".join(chance.choices(chance.choice(alphabets), k=chance.randrange(1, 40))) for _ in range(n)]
    anything = [chr(c) for c in range(1, 0x30000) if not 0xD800 <= c < 0xE000]
    return made + ["".join(chance.choices(anything, k=20)) for _ in range(n // 4)]


@pytest.fixture(scope="module", params=MODELS)
def pair(request):
    """(our tokenizer, transformers' tokenizer put right, where the file lies)."""
    path = env.cache_dir() / "models" / f"{request.param}.gguf"
    if not path.is_file():
        pytest.skip(f"{request.param} is not in the cache: kilat model pull {request.param}")
    twin = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if request.param == "smollm2":
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        twin.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(True), byte_level]
        )
    else:
        twin.backend_tokenizer.normalizer = normalizers.NFC()
    files = Files("gguf", path)
    return Tokenizer.from_files(files), twin, files


def test_ids_equal_transformers(pair):
    ours, twin, _ = pair
    source = Path(chat_templates.__file__).read_text()
    for text in [*TEXTS, *random_texts(400), source, source.replace(" ", "  ")]:
        assert ours.encode(text) == twin.encode(text), repr(text)
        assert ours.encode(text, add_special=False) == twin.encode(text, add_special_tokens=False), repr(text)


def test_text_of_ids_equals_transformers(pair):
    ours, twin, _ = pair
    for text in [*TEXTS, *random_texts(100)]:
        ids = ours.encode(text)
        for skip in (True, False):
            expected = twin.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special=skip) == expected, repr(text)
            stream = StreamDetokenizer(ours, skip_special=skip)
            assert "".join([*(stream.push([i]) for i in ids), stream.finish()]) == expected


def test_text_of_random_ids_equals_transformers(pair):
    ours, twin, _ = pair
    chance = random.Random(5)
    for _ in range(200):
        ids = [chance.randrange(ours.vocab_size) for _ in range(30)]
        assert ours.decode(ids) == twin.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def test_every_single_token_has_the_text_that_transformers_gives_it(pair):
    ours, twin, _ = pair
    theirs = twin.backend_tokenizer.decode_batch(
        [[i] for i in range(ours.vocab_size)], skip_special_tokens=False
    )
    assert [ours.token_str(i) for i in range(ours.vocab_size)] == theirs


def test_special_tokens_equal_transformers(pair):
    ours, twin, _ = pair
    assert (ours.bos_id, ours.eos_id) == (twin.bos_token_id, twin.eos_token_id)
    assert set(twin.all_special_ids) <= ours.special_ids
    assert ours.vocab_size == len(twin)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a place, in °C <now>",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Jakarta", "São Paulo"]},
                    "days": {"type": "integer"},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
CALLS = [
    {
        "id": "c1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": {"city": "São Paulo", "days": 2}},
    },
    {"id": "c2", "type": "function", "function": {"name": "now", "arguments": {}}},
]
CONVERSATIONS = {
    "one question": [{"role": "user", "content": "Hi"}],
    "system": [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "Hi 🙂 <|im_end|>{{ x }}"},
    ],
    "turns": [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "5\n"},
    ],
    "calls": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "c1", "content": '{"t": 30}'},
        {"role": "tool", "tool_call_id": "c2", "content": "12:00"},
        {"role": "assistant", "content": "30 °C"},
        {"role": "user", "content": "Thanks"},
    ],
    "call without content": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": CALLS[:1]},
        {"role": "tool", "tool_call_id": "c1", "content": "30"},
    ],
}


def check_prompts(
    ours: ChatTemplate, twin: transformers.PreTrainedTokenizerBase, conversation: str, *, with_tools: bool
) -> None:
    """Both render one conversation alike, open and closed."""
    messages, tools = CONVERSATIONS[conversation], TOOLS if with_tools else None
    for opens in (True, False):
        options = {"tools": tools, "add_generation_prompt": opens}
        expected = twin.apply_chat_template(messages, tokenize=False, **options)
        assert ours.render(messages, **options) == expected


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_prompts_of_real_models_equal_transformers(pair, conversation):
    ours, twin, files = pair
    template = load_template(files, ours)
    needs_content = "tool_calls" not in template.source
    if needs_content and conversation == "call without content":
        pytest.skip("this model's template knows no calls")
    for with_tools in (False, True):
        check_prompts(template, twin, conversation, with_tools=with_tools)


def test_ids_of_a_prompt_equal_transformers(pair):
    ours, twin, files = pair
    messages = CONVERSATIONS["turns"]
    prompt = load_template(files, ours).render(messages)
    expected = twin.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.encode(prompt, add_special=False) == expected


@pytest.fixture(scope="module", params=[byte_level_tokenizer, sentencepiece_tokenizer])
def directory(request, tmp_path_factory):
    """(our tokenizer, transformers' tokenizer, files) of one Hugging Face directory."""
    tokenizer = request.param(add_bos_token=True)
    names = [tokenizer.token_str(i) for i in (tokenizer.bos_id, tokenizer.eos_id)]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names[0],
        "eos_token": names[1],
        "clean_up_tokenization_spaces": False,
    }
    files = write_directory(tmp_path_factory.mktemp("hf"), tokenizer, config)
    return Tokenizer.from_files(files), transformers.AutoTokenizer.from_pretrained(files.path), files


def test_directory_gives_the_ids_of_transformers(directory):
    ours, twin, _ = directory
    for text in [
        "hello world",
        " hello",
        "hello\n the STOP é🙂",
        "<|end|>hello</s> world",
        "",
        *random_texts(60),
    ]:
        assert ours.encode(text) == twin.encode(text), repr(text)
        ids = ours.encode(text, add_special=False)
        assert ours.decode(ids) == twin.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("flags", [(True, False), (False, False), (True, True), (False, True)])
def test_flags_of_a_directory_mean_what_they_mean_to_transformers(flags, tmp_path):
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|start|>",
        "eos_token": "<|end|>",
        "add_bos_token": flags[0],
        "add_eos_token": flags[1],
    }
    files = write_directory(tmp_path, byte_level_tokenizer(), config)
    twin = transformers.AutoTokenizer.from_pretrained(files.path)
    assert Tokenizer.from_files(files).encode("hello") == twin.encode("hello")


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", chat_templates.ALL)
def test_prompts_of_other_templates_equal_transformers(name, conversation, tmp_path):
    if name == "chatml" and conversation == "call without content":
        pytest.skip("ChatML knows no calls")
    source = chat_templates.ALL[name]
    config = {"bos_token": "<|start|>", "eos_token": "<|end|>", "chat_template": source}
    files = write_directory(tmp_path, byte_level_tokenizer(), config)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    twin = transformers.PreTrainedTokenizerFast.from_pretrained(files.path)
    template = load_template(files, Tokenizer.from_files(files))
    for with_tools in (False, True):
        check_prompts(template, twin, conversation, with_tools=with_tools)


def test_extra_variables_mean_what_they_mean_to_transformers(tmp_path):
    config = {"chat_template": chat_templates.QWEN, "bos_token": "<|start|>", "eos_token": "<|end|>"}
    files = write_directory(tmp_path, byte_level_tokenizer(), config)
    twin = transformers.PreTrainedTokenizerFast.from_pretrained(files.path)
    messages = CONVERSATIONS["one question"]
    expected = twin.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    ours = load_template(files, Tokenizer.from_files(files)).render(
        messages, extra={"enable_thinking": False}
    )
    assert ours == expected and "</think>" in ours
