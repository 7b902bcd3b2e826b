"""The journal survives a kill at any byte: afterwards every row is in OUT exactly once."""

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.base.errors import ConfigError, KilatError
from kilat.cli.journal import HEADER_SUFFIX, Identity, Journal, open_journal

pytestmark = pytest.mark.logic

WHO = Identity("ab" * 32, 5, "m")


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def row(custom_id: str, failed: bool = False) -> dict[str, object]:
    text = 'line one\nline two "quoted" é \u2028\u0085 \x1e'
    return {
        "custom_id": custom_id,
        "response": {"body": {"text": text}},
        "error": {"code": "x"} if failed else None,
    }


def ids_in(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines() if line]


def test_new_journal_writes_its_header_before_the_first_row(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    journal = open_journal(out, WHO)
    header = json.loads((tmp_path / f"out.jsonl{HEADER_SUFFIX}").read_text())
    assert header["input_sha256"] == WHO.input_sha256 and out.read_bytes() == b""
    journal.append(row("a"))
    journal.close()
    assert ids_in(out) == ["a"]


def test_reopened_journal_knows_what_is_done_and_what_failed(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    journal = open_journal(out, WHO)
    journal.append(row("a"))
    journal.append(row("b", failed=True))
    journal.close()
    again = open_journal(out, WHO)
    assert (again.done, again.failed, again.cut_bytes) == ({"a", "b"}, {"b"}, 0)
    again.close()


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.data())
def test_file_cut_at_any_byte_goes_on_with_the_whole_rows(failed: list[bool], data: st.DataObject) -> None:
    ids = [f"row {i} é" for i in range(len(failed))]
    with folder() as tmp:
        out = tmp / "out.jsonl"
        journal = open_journal(out, WHO)
        for name, bad in zip(ids, failed):
            journal.append(row(name, bad))
        journal.close()
        whole = out.read_bytes()
        cut = data.draw(st.integers(0, len(whole)))
        os.truncate(out, cut)
        kept = whole[:cut].count(b"\n")

        again = open_journal(out, WHO)
        assert again.done == set(ids[:kept]) and again.cut_bytes == cut - (whole[:cut].rfind(b"\n") + 1)
        for name in ids:
            if name not in again.done:
                again.append(row(name))
        again.close()
        assert sorted(ids_in(out)) == sorted(ids)


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the process runs any more."""


class KillingDisk:
    """Writes ``budget`` bytes at most, then the process dies. Writes come out short, as a disk may make
    them.
    """

    def __init__(self, budget: int, piece: int) -> None:
        self.budget, self.piece = budget, piece

    def __call__(self, fd: int, data: bytes, /) -> int:
        part = data[: min(self.piece, self.budget)]
        if not part:
            raise Killed
        self.budget -= len(part)
        return os.write(fd, part)


def run_until_killed(out: Path, ids: list[str], disk: KillingDisk) -> bool:
    """One run of a batch; whether it came to its end."""
    journal = open_journal(out, WHO, write=disk)
    try:
        for name in ids:
            if name not in journal.done:
                journal.append(row(name))
        return True
    except Killed:
        return False
    finally:
        os.close(journal._fd)  # what the kernel does for a dead process; nothing is flushed


@given(st.integers(1, 6), st.lists(st.integers(0, 700), max_size=4), st.integers(1, 200))
def test_killed_at_any_write_any_number_of_times_each_row_is_there_once(
    n: int, budgets: list[int], piece: int
) -> None:
    ids = [f"r{i}" for i in range(n)]
    with folder() as tmp:
        out = tmp / "out.jsonl"
        for budget in budgets:
            if run_until_killed(out, ids, KillingDisk(budget, piece)):
                break
        assert run_until_killed(out, ids, KillingDisk(1 << 30, 1 << 20))
        assert sorted(ids_in(out)) == ids


def test_every_single_write_point_of_a_small_run_can_be_the_last(tmp_path: Path) -> None:
    ids = ["a", "b"]
    out = tmp_path / "out.jsonl"
    assert run_until_killed(out, ids, KillingDisk(1 << 30, 1 << 20))
    size = out.stat().st_size
    for budget in range(size + 1):
        out.unlink(missing_ok=True)
        assert run_until_killed(out, ids, KillingDisk(budget, 1 << 20)) is (budget == size)
        assert run_until_killed(out, ids, KillingDisk(1 << 30, 7))
        assert sorted(ids_in(out)) == ids, f"killed after {budget} bytes"


@pytest.mark.parametrize("kept", ["header", "out", "new header"])
def test_kill_while_the_journal_is_created_leaves_nothing_in_the_way(kept: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    journal = open_journal(out, WHO)
    journal.close()
    header = tmp_path / f"out.jsonl{HEADER_SUFFIX}"
    if kept == "header":
        out.unlink()
    else:
        data = header.read_bytes()
        header.unlink()
        if kept == "new header":
            header.with_name(header.name + ".new").write_bytes(data[:10])
    again = open_journal(out, WHO)
    again.append(row("a"))
    again.close()
    assert ids_in(out) == ["a"] and header.exists()


def test_full_disk_is_an_error_and_the_file_ends_with_the_row_before(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    left = [180]  # bytes: one row and a part of the next

    def write(fd: int, data: bytes, /) -> int:
        part = data[: left[0]]
        left[0] -= len(part)
        if not part:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(fd, part)

    journal = open_journal(out, WHO, write=write)
    journal.append(row("a"))
    with pytest.raises(KilatError, match=r"No space left.*run the same command again"):
        journal.append(row("b"))
    assert ids_in(out) == ["a"] and journal.done == {"a"}
    left[0] = 10_000  # somebody made room
    journal.append(row("b"))
    journal.close()
    assert ids_in(out) == ["a", "b"]


def begun(out: Path, *ids: str) -> None:
    journal = open_journal(out, WHO)
    for name in ids:
        journal.append(row(name))
    journal.close()


@pytest.mark.parametrize(
    ("identity", "says"),
    [
        (Identity("cd" * 32, 5, "m"), "the input has changed"),
        (Identity(WHO.input_sha256, 5, "other"), "begun with model m, got other"),
    ],
)
def test_rows_of_another_input_or_model_are_never_mixed(
    identity: Identity, says: str, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    begun(out, "a")
    before = out.read_bytes()
    with pytest.raises(ConfigError, match=says):
        open_journal(out, identity)
    assert out.read_bytes() == before


def test_a_journal_without_rows_may_begin_again_with_another_input(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    begun(out)
    other = Identity("cd" * 32, 9, "m")
    open_journal(out, other).close()
    with pytest.raises(ConfigError, match="input has changed"):
        begun_with = open_journal(out, other)
        begun_with.append(row("a"))
        begun_with.close()
        open_journal(out, WHO)


def test_a_file_that_no_run_wrote_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("my notes")
    with pytest.raises(ConfigError, match="choose another OUT"):
        open_journal(out, WHO)
    assert out.read_text() == "my notes"


def test_damage_in_the_middle_is_reported_with_its_line_and_nothing_is_cut(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    begun(out, "a", "b", "c")
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(lines[0] + b"\x00\x00\x00\n" + lines[2])
    with pytest.raises(ConfigError, match="damaged at line 2"):
        open_journal(out, WHO)
    assert out.read_bytes().endswith(lines[2])


def test_damage_at_the_end_is_cut_off_and_counted(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    begun(out, "a", "b")
    good = out.read_bytes()
    with open(out, "ab") as f:
        f.write(b"\x00" * 9 + b"\n" + b'{"custom_id": 7}\n{"cust')
    journal = open_journal(out, WHO)
    journal.close()
    assert out.read_bytes() == good and journal.cut_bytes == 10 + 17 + 6


def test_a_row_that_is_there_twice_is_an_error(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    begun(out, "a", "b")
    out.write_bytes(out.read_bytes() + out.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(ConfigError, match="row 'a' twice, again at line 3"):
        open_journal(out, WHO)


def test_damaged_header_is_an_error_that_names_both_files(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    begun(out, "a")
    (tmp_path / f"out.jsonl{HEADER_SUFFIX}").write_text("{")
    with pytest.raises(ConfigError, match=r"out\.jsonl\.journal is damaged"):
        open_journal(out, WHO)


def test_two_runs_cannot_write_the_same_file(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    first = open_journal(out, WHO)
    with pytest.raises(ConfigError, match="written by another run"):
        open_journal(out, WHO)
    first.close()
    open_journal(out, WHO).close()


def test_sync_reaches_the_disk_once_per_batch_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal: Journal = open_journal(tmp_path / "out.jsonl", WHO)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    for name in "abc":
        journal.append(row(name))
    assert synced == []
    journal.sync()
    journal.sync()
    assert len(synced) == 1
    journal.append(row("d"))
    journal.close()
    assert len(synced) == 2


def test_folder_that_cannot_be_written_is_a_plain_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be opened for writing"):
        open_journal(tmp_path / "nowhere" / "out.jsonl", WHO)
