"""What is on this disk is found without anything that downloads."""

import subprocess
import sys
from pathlib import Path

import pytest

from kilat.base.errors import SourceError
from kilat.load import catalogue
from kilat.load.files import ModelFiles
from kilat.load.local import find_local

pytestmark = pytest.mark.logic


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a working folder that holds nothing else."""
    monkeypatch.setenv("KILAT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def test_name_that_is_nowhere_is_none() -> None:
    assert find_local("owner/name") is None and find_local("x" * 5000) is None


def test_catalogue_model_counts_when_all_of_its_bytes_are_in_the_cache(cache: Path) -> None:
    model = catalogue.CATALOGUE[0]
    path = catalogue.cached_path(model, cache)
    assert find_local(model.name) is None
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(model.n_bytes - 1)
    assert find_local(model.name) is None
    with path.open("r+b") as file:
        file.truncate(model.n_bytes)
    assert find_local(model.name) == ModelFiles("gguf", path, model.name)


def test_file_of_the_name_of_a_catalogue_model_is_not_that_model(tmp_path: Path) -> None:
    name = catalogue.CATALOGUE[0].name
    (tmp_path / name).write_bytes(b"GGUF")
    assert find_local(name) is None


def test_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(SourceError, match=r"weights\.bin is not a model"):
        find_local("weights.bin")


def test_finding_imports_nothing_that_downloads() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'httpx', 'huggingface_hub', 'rich'): sys.modules[name] = None\n"
        "from kilat.cli.fetch import fetch\n"
        "print(fetch(sys.argv[1]).kind)"
    )
    Path("m.gguf").write_bytes(b"GGUF")
    ran = subprocess.run([sys.executable, "-c", code, "m.gguf"], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout.strip()) == (0, "gguf"), ran.stderr
