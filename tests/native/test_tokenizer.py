"""The runtime's tokenizer gives the ids of the package's tokenizer."""

import random

import pytest

from kilat.load.files import ModelFiles
from kilat.load.sources import resolve
from kilat.native.runtime import NativeModel
from kilat.text.tokenizer import Tokenizer
from tests.native import checkpoints

WORDS = (
    "the a don't I'LL we've THEY'RE it's x'S 'ſ Hello wORLD naïve café ½ Ⅷ 東京 안녕하세요 각 á Å 1234 12 3.14 \n \r\n \t "
    "\u00a0 \u3000 \u2028 \x85 \x1c 🙂👩‍👩‍👧 ! ?! ... foo_bar(baz) {} \u0301 e\u0301 \u1100\u1161\u11a8 \u0915\u093c नमस्ते مرحبا ﬁ \ufeff "
    "\u200b \x00 '' \" ` <|im_start|> <|im_end|> <|endoftext|> <|260|> <|im_start"
).split(" ")


def texts(seed: int, n: int) -> list[str]:
    """Words of many scripts in odd company, and characters drawn from everywhere."""
    rng = random.Random(seed)
    found = ["", " ", "\n\n  x", "a" * 300]
    for _ in range(n):
        found.append("".join(rng.choice(WORDS) + rng.choice(["", " ", "  ", "\n", " \n "]) for _ in range(8)))
        codes = [rng.randrange(rng.choice([0x80, 0x800, 0x3000, 0x10000, 0x20000])) for _ in range(12)]
        found.append("".join(map(chr, codes)).encode("utf-8", "ignore").decode())
    return found


def check(files: ModelFiles, n: int) -> None:
    tokenizer = Tokenizer.from_files(files)
    with NativeModel(files.path) as model:
        for text in texts(11, n):
            assert model.encode(text) == tokenizer.encode(text), text
        for i in range(tokenizer.vocab_size):
            assert model.token_bytes(i) == tokenizer.token_bytes(i), i


@pytest.mark.cpu
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_ids_of_a_tiny_vocabulary_are_the_packages(architecture, tmp_path, runtime):
    path = checkpoints.write_gguf(tmp_path / "tiny.gguf", architecture, {"": "Q8_0"})
    check(ModelFiles("gguf", path, "tiny"), 150)


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["smollm2", "qwen2.5-coder-0.5b"])
def test_ids_of_a_real_vocabulary_are_the_packages(name, runtime):
    check(resolve(name), 600)


@pytest.mark.cpu
def test_text_without_special_has_no_control_tokens(tmp_path, runtime):
    path = checkpoints.write_gguf(tmp_path / "tiny.gguf", "llama", {"": "Q8_0"})
    with NativeModel(path) as model:
        assert model.encode("<|0|>") == [256]
        assert 256 not in model.encode("<|0|>", special=False)
