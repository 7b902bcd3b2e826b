"""Progress: lines where there is no terminal, a bar where there is one, never anything on standard output."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from kilat.cli import progress
from kilat.cli.progress import RowBar, TransferBar, spinner
from kilat.load.download import Progress

pytestmark = pytest.mark.logic

MIB = 1 << 20


class Clock:
    """Stands for the time module."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal of 100 columns in place of standard error."""
    file = io.StringIO()
    make: Callable[..., Console] = lambda **_: Console(file=file, force_terminal=True, width=100)  # noqa: E731
    monkeypatch.setattr(progress, "Console", make)
    return file


def test_transfer_bar_is_what_downloads_report_to() -> None:
    bar: Progress = TransferBar()
    assert bar is not None


def test_plain_progress_is_a_line_every_few_seconds_with_rate_and_time_left(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with TransferBar() as bar:
        bar.start("download m", 100 * MIB)
        for _ in range(12):
            clock.now += 1
            bar.advance(5 * MIB)
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == [
        "download m: 25.0 MiB of 100.0 MiB, 5.0 MiB/s, 15 s left",
        "download m: 50.0 MiB of 100.0 MiB, 5.0 MiB/s, 10 s left",
        "download m: 60.0 MiB of 100.0 MiB, 5.0 MiB/s, 8 s left",
    ]


def test_every_piece_of_work_has_its_own_lines_and_the_last_is_said_once(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with TransferBar() as bar:
        bar.start("a", 10)
        clock.now += 1
        bar.advance(10)
        bar.finish()
        bar.start("b", 20)
        clock.now += 2
        bar.advance(20)
        bar.advance(-5)  # damaged bytes were thrown away
    assert [line.split(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        "a: 10 B of 10 B",
        "b: 15 B of 20 B",
    ]


def test_nothing_to_do_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with TransferBar():
        pass
    assert capsys.readouterr() == ("", "")


def test_rows_of_an_earlier_run_count_as_done_but_not_for_the_rate(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with RowBar("rows", 100, 90) as bar:
        clock.now += 2
        bar.advance(4)
    assert capsys.readouterr().err == "rows: 94 of 100, 2/s, 3 s left\n"


def test_terminal_gets_a_bar_with_amount_and_label(screen: io.StringIO) -> None:
    with TransferBar() as bar:
        bar.start("download m", 4 * MIB)
        bar.advance(2 * MIB)
    assert "download m" in screen.getvalue() and "2.0/4.0 MiB" in screen.getvalue()
    with RowBar("rows", 10, 3) as rows:
        rows.advance(4)
    assert "7/10" in screen.getvalue()


def test_bar_goes_away_when_the_work_fails(screen: io.StringIO) -> None:
    with pytest.raises(ValueError, match="broken"), TransferBar() as bar:
        bar.start("download m", 4)
        raise ValueError("broken")
    assert screen.getvalue().endswith("\x1b[?25h"), "the cursor must be shown again"


def test_spinner_is_one_line_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with spinner("starting m"):
        pass
    assert capsys.readouterr() == ("", "starting m\n")


def test_rate_below_one_is_told_with_two_digits(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with RowBar("rows", 3) as bar:
        clock.now += 40
        bar.advance()
    assert capsys.readouterr().err == "rows: 1 of 3, 0.025/s, 80 s left\n" * 2
