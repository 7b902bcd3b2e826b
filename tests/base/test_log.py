"""Logs: nothing on import, one line per event on stderr, at the level that was asked for."""

import logging
from collections.abc import Iterator

import pytest

from kilat.base import log
from kilat.base.errors import ConfigError

pytestmark = pytest.mark.logic


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Gives the logger tree back as it was."""
    root = logging.getLogger("kilat")
    before = (root.level, list(root.handlers), root.propagate)
    yield
    root.setLevel(before[0])
    root.handlers[:], root.propagate = before[1], before[2]


def test_loggers_are_below_kilat() -> None:
    assert log.get_logger("worker").name == "kilat.worker"
    assert log.get_logger("worker") is log.get_logger("worker")


def test_asking_for_a_logger_installs_nothing() -> None:
    root = logging.getLogger("kilat")
    root.handlers.clear()
    log.get_logger("quiet")
    assert root.handlers == [] and logging.getLogger("kilat.quiet").handlers == []


def test_event_is_one_line_with_its_fields_in_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KILAT_LOG", raising=False)
    log.setup("gateway")
    log.event(log.get_logger("http"), "request", id="r-1", status=200, ttft_ms=1.5)
    out, err = capsys.readouterr()
    assert out == ""
    line = err.removesuffix("\n")
    assert "\n" not in line
    assert line.endswith(" I gateway kilat.http request id=r-1 status=200 ttft_ms=1.5")


def test_value_with_a_percent_sign_is_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KILAT_LOG", raising=False)
    log.setup("gateway")
    log.event(log.get_logger("http"), "full", used="90%s")
    assert capsys.readouterr().err.endswith("full used=90%s\n")


@pytest.mark.parametrize(("level", "shown"), [("debug", "DIW"), ("info", "IW"), ("warning", "W")])
def test_level_of_the_environment_decides_what_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, level: str, shown: str
) -> None:
    monkeypatch.setenv("KILAT_LOG", level)
    log.setup("worker")
    logger = log.get_logger("x")
    logger.debug("a")
    log.event(logger, "b")
    logger.warning("c")
    assert "".join(line.split()[2] for line in capsys.readouterr().err.splitlines()) == shown


def test_setup_twice_does_not_say_everything_twice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KILAT_LOG", raising=False)
    log.setup("first")
    log.setup("second")
    log.event(log.get_logger("x"), "once")
    err = capsys.readouterr().err
    assert err.count("once") == 1 and " second " in err


def test_lines_do_not_reach_the_loggers_of_the_program_around_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KILAT_LOG", raising=False)
    log.setup("worker")
    log.event(log.get_logger("x"), "mine")
    assert caplog.records == []


def test_unknown_level_is_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILAT_LOG", "loud")
    before = list(logging.getLogger("kilat").handlers)
    with pytest.raises(ConfigError, match="loud"):
        log.setup("worker")
    assert logging.getLogger("kilat").handlers == before
