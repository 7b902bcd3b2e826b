"""A model directory with a byte-level tokenizer (one byte is one token) and a ChatML template; there are no weights."""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

IM_START, IM_END, EOS = 256, 257, 258

TEMPLATE = (
    "{%- if tools %}<|im_start|>system\nAnswer with <tool_call> and JSON. Tools:"
    "{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>\n{% endif -%}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)


@dataclass(frozen=True)
class TinyFiles:
    """Stands for ``kilat.load.sources.ModelFiles``."""

    path: Path
    kind: str = "hf"
    name: str = "tiny"


def write_tiny_model(folder: Path, *, template: str | None = TEMPLATE) -> TinyFiles:
    """Write tokenizer.json and tokenizer_config.json; ids 0 to 255 are the bytes, then im_start, im_end, endoftext."""
    letters = _byte_letters()
    tokenizer = Tokenizer(models.BPE(vocab={letters[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not None})
    )
    return TinyFiles(folder)


def _byte_letters() -> list[str]:
    """GPT-2's printable letter for each byte: printable Latin-1 stands for itself, the rest is moved above 255."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(moved)) for b in range(256)]
