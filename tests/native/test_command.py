"""`kilat native`: what it imports before a file's first token, and that both tokenizers write the same text."""

import subprocess
import sys
from pathlib import Path

import pytest

from kilat.base.errors import ConfigError
from kilat.cli.main import main
from kilat.native.runtime import NativeModel
from tests.native import checkpoints

pytestmark = pytest.mark.cpu

HEAVY = ("torch", "numpy", "httpx", "huggingface_hub", "rich", "tokenizers", "jinja2", "msgspec", "asyncio")
BLOCKED = f"""
import sys
for name in {HEAVY!r}:
    sys.modules[name] = None  # an import of it raises ImportError
from kilat.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory, runtime: None) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return checkpoints.write_gguf(path, "llama", {"": "Q8_0"})


def command(path: Path) -> list[str]:
    return ["native", str(path), "-p", "two words", "--max-tokens", "12", "--ignore-eos"]


def test_text_from_a_file_needs_nothing_that_is_slow_to_import(
    gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = subprocess.run(
        [sys.executable, "-c", BLOCKED, *command(gguf)], capture_output=True, text=True, timeout=60
    )
    assert alone.returncode == 0, alone.stderr
    assert main(command(gguf)) == 0
    assert alone.stdout == capsys.readouterr().out and len(alone.stdout) > 1


def test_text_is_the_same_from_the_packages_tokenizer_where_the_runtime_has_none(
    gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(gguf)) == 0
    own = capsys.readouterr().out

    def no_tokenizer(model: NativeModel, text: str, *, special: bool = True) -> list[int]:
        raise ConfigError("no tokenizer")

    monkeypatch.setattr(NativeModel, "encode", no_tokenizer)
    assert main(command(gguf)) == 0
    assert capsys.readouterr().out == own


def test_chat_of_a_file_without_a_template_says_so(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command(gguf), "--chat"]) == 2
    assert "no chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("-p", ""), "the prompt is empty"),
        (("-p", "word " * 40, "--context", "8"), "tokens, the context is 8: shorten it, or give --context"),
        (("-p", "x", "--library", __file__), "build it with `make -C native`"),
    ],
)
def test_what_cannot_be_done_is_one_line_with_the_fix(
    argv: tuple[str, ...], says: str, gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["native", str(gguf), *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kilat native: ") and err.count("\n") == 1 and says in err
