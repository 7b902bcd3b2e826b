"""`kilat model`: what is said about models on disk and in the catalogue."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kilat.base.errors import ModelFileError
from kilat.cli.facts import read_facts
from kilat.cli.main import main
from kilat.load import sources
from kilat.load.files import ModelFiles
from kilat.load.sources import catalogue
from tests.cli.whole_model import CONFIG, PARAMETERS, write_model

pytestmark = pytest.mark.logic


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILAT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    return write_model(folder)


def test_facts_come_from_headers_and_config(model: Path) -> None:
    facts = read_facts(ModelFiles("hf", model, "tiny"))
    assert (facts.architecture, facts.parameters, facts.context) == ("llama", PARAMETERS, 512)
    assert facts.stored_bytes == PARAMETERS * 4
    assert facts.formats == {"F32": (20, PARAMETERS, PARAMETERS * 4)}
    assert facts.kv_values == 2 * 2 * 2 * 16, "keys and values, 2 layers, 2 heads of 16"


def test_head_dim_of_its_own_and_missing_kv_heads_are_honoured(tmp_path: Path) -> None:
    folder = write_model(tmp_path, head_dim=32, num_key_value_heads=None)
    assert read_facts(ModelFiles("hf", folder, "x")).kv_values == 2 * 2 * 4 * 32


def test_second_copy_of_the_weights_is_not_counted(model: Path) -> None:
    save_file({"w": np.zeros((4, 4), np.float16)}, model / "consolidated.safetensors")
    save_file({"w": np.zeros((2, 4), np.float16)}, model / "model-00002.safetensors")
    facts = read_facts(ModelFiles("hf", model, "tiny"))
    assert facts.formats["F16"] == (1, 8, 16)
    assert facts.parameters == PARAMETERS + 8


def test_directory_without_weights_is_an_error(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="no safetensors files"):
        read_facts(ModelFiles("hf", model, "tiny"))


def test_info_shows_architecture_sizes_context_and_kv(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "info", str(model)]) == 0
    out = capsys.readouterr().out
    for text in (
        "llama",
        f"{PARAMETERS:,}",
        "512 tokens",
        "in bfloat16",
        "in float32",
        "F32",
        "32.00 bits per value",
    ):
        assert text in out, text
    assert f"{128 * 2:,} bytes per token" in out and f"{128 * 4:,} bytes per token" in out


def test_info_of_a_config_without_sizes_is_one_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = {k: v for k, v in CONFIG.items() if k != "hidden_size"}
    (model / "config.json").write_text(json.dumps(broken))
    assert main(["model", "info", str(model)]) == 2
    assert "hidden_size is None" in capsys.readouterr().err


def test_list_shows_the_catalogue_and_that_nothing_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for entry in catalogue():
        line = next(li for li in lines if li.strip().startswith(entry.name))
        assert entry.title in line and " no " in line and entry.license in line


def test_info_of_a_catalogue_model_that_is_not_here_downloads_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources, "resolve", lambda *args: pytest.fail("a download was started"))
    assert main(["model", "info", "smollm2"]) == 1
    err = capsys.readouterr().err
    assert "93.8 MiB" in err and "kilat model pull smollm2" in err and err.count("\n") == 1


def test_pull_of_a_model_on_disk_says_what_it_is(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "pull", str(model)]) == 0
    assert "parameters" in capsys.readouterr().out


def test_unknown_model_is_one_line_with_the_names_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "pull", "no-such-model"]) == 1
    err = capsys.readouterr().err
    assert "smollm2" in err and err.count("\n") == 1
