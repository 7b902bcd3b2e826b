"""Progress on standard error: bars on a terminal, a line every few seconds elsewhere. Implements ``load``'s
Progress protocol.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kilat.cli.text import n_bytes_text

PLAIN_INTERVAL_S = 5.0


class TransferBar:
    """Bytes of a download: amount, rate and time left; a context manager. ``start`` may be called again for
    the next file.
    """

    def __init__(self) -> None:
        self._bar = _Bar((DownloadColumn(binary_units=True), TransferSpeedColumn()), n_bytes_text)

    def __enter__(self) -> "TransferBar":
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.finish()

    def start(self, label: str, total_bytes: int) -> None:
        self._bar.start(label, total_bytes, 0)

    def advance(self, n_bytes: int) -> None:
        self._bar.advance(n_bytes)

    def finish(self) -> None:
        self._bar.finish()


class RowBar:
    """Rows or requests: number, rate and time left; a context manager. ``done`` of them were finished
    before.
    """

    def __init__(self, label: str, total: int, done: int = 0) -> None:
        self._bar = _Bar((MofNCompleteColumn(), _RateColumn()), _number)
        self._args = (label, total, done)

    def __enter__(self) -> "RowBar":
        self._bar.start(*self._args)
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.finish()

    def advance(self, n: int = 1) -> None:
        self._bar.advance(n)


@contextmanager
def spinner(label: str) -> Iterator[None]:
    """Shows that something of unknown length goes on."""
    console = Console(stderr=True)
    if not console.is_terminal:
        print(label, file=sys.stderr, flush=True)
        yield
        return
    with console.status(label):
        yield


def _number(n: float) -> str:
    return f"{n:,.1f}".removesuffix(".0") if n >= 1 or n == 0 else f"{n:.2g}"


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> str:
        return f"{task.speed:.1f}/s" if task.speed else "-/s"


class _Bar:
    def __init__(self, columns: tuple[ProgressColumn, ...], show: Callable[[float], str]) -> None:
        self._columns, self._show = columns, show
        self._console = Console(stderr=True)
        self._rich: Progress | None = None
        self._task = TaskID(0)
        self._label, self._total, self._first, self._done = "", 0, 0, 0
        self._began = self._said = 0.0

    def start(self, label: str, total: int, done: int) -> None:
        self.finish()
        self._label, self._total, self._first, self._done = label, total, done, done
        self._began = self._said = time.monotonic()
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), *self._columns, TimeRemainingColumn())
            self._rich = Progress(*columns, console=self._console)
            self._rich.start()
            self._task = self._rich.add_task(label, total=total, completed=done)

    def advance(self, n: int) -> None:
        self._done += n
        if self._rich is not None:
            self._rich.advance(self._task, n)
        elif time.monotonic() - self._said >= PLAIN_INTERVAL_S:
            self._said = time.monotonic()
            self._say()

    def finish(self) -> None:
        if self._rich is not None:
            self._rich.stop()
            self._rich = None
        elif self._label:
            self._say()
        self._label = ""

    def _say(self) -> None:
        rate = (self._done - self._first) / max(time.monotonic() - self._began, 1e-6)
        left = f"{(self._total - self._done) / rate:.0f} s left" if rate > 0 else "time left unknown"
        amount = f"{self._show(self._done)} of {self._show(self._total)}"
        print(f"{self._label}: {amount}, {self._show(rate)}/s, {left}", file=sys.stderr, flush=True)
