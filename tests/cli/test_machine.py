"""What is read of the machine."""

import os
from pathlib import Path

import pytest

from kilat.cli import machine
from kilat.cli.machine import read_machine
from kilat.cli.text import count_text, n_bytes_text

pytestmark = pytest.mark.logic


def test_this_machine_has_cores_and_memory() -> None:
    m = read_machine()
    assert 1 <= m.cores <= (os.cpu_count() or 1)
    assert 0 < m.free_bytes <= m.memory_bytes and m.cpu


def test_memory_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = machine.Path

    def place(name: str) -> Path:
        return tmp_path / name.rpartition("/")[2] if name.startswith("/sys/fs/cgroup") else real(name)

    monkeypatch.setattr(machine, "Path", place)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    m = read_machine()
    assert (m.memory_bytes, m.free_bytes) == (1_000_000, 600_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert read_machine().memory_bytes > 1_000_000


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (98_362_432, "93.8 MiB"), (5 << 40, "5120.0 GiB")],
)
def test_bytes_are_written_as_people_read_them(n: int, text: str) -> None:
    assert n_bytes_text(n) == text


@pytest.mark.parametrize(
    ("n", "text"), [(999, "999"), (134_515_008, "134.5M"), (7_600_000_000, "7.6B"), (2000, "2.0K")]
)
def test_counts_are_written_as_people_read_them(n: int, text: str) -> None:
    assert count_text(n) == text
