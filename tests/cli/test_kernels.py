"""The CPU kernels are built before a model is loaded, and who gets the slow ones hears why."""

import time
from pathlib import Path

import pytest

from kilat.base.errors import ConfigError
from kilat.cli import kernels
from kilat.cli.main import build_parser

pytestmark = pytest.mark.logic


def prepared(line: str) -> list[str]:
    """What is warned of before this command."""
    said: list[str] = []
    kernels.prepare(build_parser().parse_args(line.split()), said.append)
    return said


def refuse() -> Path:
    raise ConfigError("no C++ compiler found: install one")


def test_kernels_that_cannot_be_built_are_a_warning_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "build", refuse)
    monkeypatch.setattr(kernels, "cuda_devices", lambda: [])
    for line in ("serve m", "serve m --device cpu", "chat m --kernels auto"):
        [said] = prepared(line)
        assert "no C++ compiler found: install one" in said and "longer" in said


def test_kernels_are_not_built_for_a_device_or_a_person_that_takes_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "build", refuse)
    monkeypatch.setattr(kernels, "cuda_devices", lambda: ["0"])
    assert prepared("serve m") == prepared("serve m --device cuda") == []
    assert prepared("serve m --device cpu") != []
    monkeypatch.setattr(kernels, "cuda_devices", lambda: [])
    assert prepared("serve m --kernels reference") == []


def test_a_build_that_takes_long_says_so_and_a_quick_one_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with kernels.told_when_slow("building it"):
        pass
    monkeypatch.setattr(kernels, "SLOW_AFTER_S", 0.01)
    with kernels.told_when_slow("building more"):
        deadline = time.monotonic() + 30
        while not (err := capsys.readouterr().err):
            assert time.monotonic() < deadline
            time.sleep(0.005)
    assert err == "building more\n"
