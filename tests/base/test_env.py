"""The variables that kilat reads."""

from pathlib import Path

import pytest

from kilat.base import env
from kilat.base.errors import ConfigError

pytestmark = pytest.mark.logic


@pytest.mark.parametrize("given", [None, ""])
def test_log_level_is_info_unless_set(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    monkeypatch.delenv("KILAT_LOG", raising=False)
    if given is not None:
        monkeypatch.setenv("KILAT_LOG", given)
    assert env.log_level() == "INFO"


@pytest.mark.parametrize("given", ["debug", "DEBUG", "Info", "warning"])
def test_log_level_is_read_in_any_case(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("KILAT_LOG", given)
    assert env.log_level() == given.upper()


@pytest.mark.parametrize("given", ["loud", "10", " info", "debug,info"])
def test_unknown_log_level_is_refused_with_the_known_ones(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("KILAT_LOG", given)
    with pytest.raises(ConfigError, match="debug, info, warning") as caught:
        env.log_level()
    assert repr(given) in caught.value.message


def test_cache_is_below_the_home_unless_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KILAT_CACHE_DIR", raising=False)
    assert env.cache_dir() == tmp_path / ".cache" / "kilat"
    monkeypatch.setenv("KILAT_CACHE_DIR", "")
    assert env.cache_dir() == tmp_path / ".cache" / "kilat"
    monkeypatch.setenv("KILAT_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert env.cache_dir() == tmp_path / "elsewhere"


def test_asking_for_the_cache_creates_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KILAT_CACHE_DIR", str(tmp_path / "new"))
    assert not env.cache_dir().exists()


def test_child_gets_the_environment_and_what_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILAT_LOG", "debug")
    child = env.child_environment(KILAT_LOG="warning", EXTRA="1")
    assert (child["KILAT_LOG"], child["EXTRA"]) == ("warning", "1")
    assert child.keys() >= {"PATH", "KILAT_LOG", "EXTRA"}
    assert env.log_level() == "DEBUG" and "EXTRA" not in env.child_environment()


@pytest.mark.parametrize(
    ("given", "names"), [("", []), ("-1", []), ("2", ["2"]), ("1, GPU-ab", ["1", "GPU-ab"])]
)
def test_devices_are_those_that_were_given(
    monkeypatch: pytest.MonkeyPatch, given: str, names: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert env.cuda_devices() == names


def test_devices_are_else_all_of_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert env.cuda_devices(tmp_path / "no driver") == []
    for bus in ("0000:1b:00.0", "0000:43:00.0"):
        (tmp_path / bus).mkdir()
    assert env.cuda_devices(tmp_path) == ["0", "1"]
