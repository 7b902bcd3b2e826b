"""The disk tier and everything that can happen to a disk: each damage is a miss, each failure turns it off, neither an error."""

import logging
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.kv.disk_tier import BLOCK_BYTES, ENTRY_BYTES, DiskTier
from tests.kv.tiers import PAGE_BYTES, disk, disk_bytes, get, name, page

pytestmark = pytest.mark.logic

ROOT = Path(__file__).resolve().parents[2]
FIRST_PAGE = 2 * BLOCK_BYTES


def filled(folder: Path, n: int = 4) -> Path:
    """A closed tier with pages 0 to n - 1; its file."""
    tier = disk(folder, n)
    for i in range(n):
        tier.put(name(i), page(i))
    tier.close()
    return folder / "pages"


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)
        f.seek(at)
        f.write(bytes([byte[0] ^ 1]))


def first_page(path: Path) -> int:
    """Where the pages begin in a file of four."""
    return 2 * BLOCK_BYTES


def test_restart_keeps_pages_and_their_order(tmp_path: Path) -> None:
    tier = disk(tmp_path, 3)
    for i in range(3):
        tier.put(name(i), page(i))
    tier.touch([name(0)])
    tier.close()
    again = disk(tmp_path, 3)
    assert again.names() == [name(1), name(2), name(0)]
    assert all(get(again, i) for i in range(3))
    again.put(name(3), page(3))
    assert not get(again, 1) and get(again, 0)
    again.close()


@pytest.mark.parametrize("change", ["key", "page size", "room"])
def test_file_of_something_else_is_begun_anew(tmp_path: Path, change: str) -> None:
    path = filled(tmp_path)
    size = path.stat().st_size
    if change == "key":
        tier = disk(tmp_path, 4, key=b"other" * 3 + b"x")
    elif change == "page size":
        tier = DiskTier(tmp_path, b"k" * 16, PAGE_BYTES - 1, disk_bytes(4))
    else:
        tier = disk(tmp_path, 3)
    assert tier.names() == [] and not tier.is_off
    assert path.stat().st_size < size
    tier.close()


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    path = filled(folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    path.chmod(0o644)
    disk(folder, 4).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_file_is_never_larger_than_allowed(tmp_path: Path) -> None:
    tier = disk(tmp_path, 4)
    for i in range(12):
        tier.put(name(i), page(i))
    tier.close()
    assert (tmp_path / "pages").stat().st_size <= disk_bytes(4)


def test_damaged_page_is_a_miss_and_its_place_is_used_again(tmp_path: Path) -> None:
    path = filled(tmp_path)
    flip(path, FIRST_PAGE + PAGE_BYTES - 1)
    tier = disk(tmp_path, 4)
    assert [get(tier, i) for i in range(4)] == [False, True, True, True]
    assert not tier.has(name(0)) and tier.take_lost() == [name(0)]
    assert tier.counters()["kilat_tier_disk_damaged_total"] == 1
    tier.put(name(9), page(9))
    assert all(get(tier, i) for i in (1, 2, 3, 9)) and not tier.is_off
    tier.close()


def test_damaged_entry_is_a_page_that_is_not_there(tmp_path: Path) -> None:
    path = filled(tmp_path)
    flip(path, BLOCK_BYTES + ENTRY_BYTES + 3)
    tier = disk(tmp_path, 4)
    assert [get(tier, i) for i in range(4)] == [True, False, True, True]
    tier.close()


def test_file_that_was_cut_off_loses_what_was_there(tmp_path: Path) -> None:
    path = filled(tmp_path)
    os.truncate(path, FIRST_PAGE + 2 * 2 * BLOCK_BYTES + 10)
    tier = disk(tmp_path, 4)
    assert [get(tier, i) for i in range(4)] == [True, True, False, False]
    assert not tier.is_off
    tier.close()


@settings(max_examples=40, deadline=None)
@given(at=st.integers(0, 2 * BLOCK_BYTES + 4 * 2 * BLOCK_BYTES - 1))
def test_no_damage_anywhere_gives_a_wrong_page(tmp_path_factory: pytest.TempPathFactory, at: int) -> None:
    path = filled(tmp_path_factory.mktemp("tier"))
    flip(path, min(at, path.stat().st_size - 1))
    tier = disk(path.parent, 4)
    assert sum(get(tier, i) for i in range(4)) in (0, 3, 4)  # 0: the header
    tier.close()


CRASH = """
import os, sys
from pathlib import Path
from tests.kv.tiers import disk, name, page

tier = disk(Path(sys.argv[1]), 3)
for i in range(3):
    tier.put(name(i), page(i))
left, real = [int(sys.argv[2])], os.pwrite

def pwrite(fd, data, at):
    if not left[0]:
        real(fd, bytes(data)[: len(data) // 2], at)
        os._exit(9)
    left[0] -= 1
    return real(fd, data, at)

os.pwrite = pwrite
tier.put(name(3), page(3))
os._exit(8)
"""


@pytest.mark.parametrize("n_whole", [0, 1, 2, 3])
def test_crash_in_the_middle_of_a_write_loses_that_page_only(tmp_path: Path, n_whole: int) -> None:
    """In the middle of clearing the entry, of the page, of setting the entry; and after it."""
    code = subprocess.run(
        [sys.executable, "-c", CRASH, str(tmp_path), str(n_whole)], cwd=ROOT, timeout=60, check=False
    ).returncode
    assert code == (8 if n_whole == 3 else 9)
    tier = disk(tmp_path, 3)
    assert get(tier, 1) and get(tier, 2)
    assert get(tier, 3) == (n_whole == 3)
    assert not get(tier, 0)
    tier.close()


@contextmanager
def file_size_limit(n_bytes: int) -> Iterator[None]:
    """As a disk that is full: writes behind so many bytes of a file fail. Of any file: what a test runner writes too, so not for long."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_full_disk_turns_the_tier_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = disk(tmp_path, 4)
    room = 2 * BLOCK_BYTES + 2 * 2 * BLOCK_BYTES + 100
    with caplog.at_level(logging.WARNING), file_size_limit(room):
        for i in range(4):
            tier.put(name(i), page(i))
    assert tier.is_off
    assert sum("off from now on" in r.message for r in caplog.records) == 1
    assert not any(tier.has(name(i)) or get(tier, i) for i in range(4))
    assert sorted(tier.take_lost()) == [name(0), name(1)]
    tier.close()
    again = disk(tmp_path, 4)  # and what had been written is still good
    assert [get(again, i) for i in range(4)] == [True, True, False, False]
    again.close()


def test_disk_without_room_for_the_table_is_off_from_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), file_size_limit(10):
        tier = disk(tmp_path, 4)
    assert tier.is_off
    tier.put(name(1), page(1))
    assert not tier.has(name(1))
    tier.close()


def test_second_process_goes_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = disk(tmp_path, 4)
    with caplog.at_level(logging.WARNING):
        second = disk(tmp_path, 4)
    assert second.is_off and not first.is_off
    assert "another process uses it" in caplog.text
    second.close()
    first.put(name(1), page(1))
    assert get(first, 1)
    first.close()
    third = disk(tmp_path, 4)
    assert get(third, 1)
    third.close()


def test_folder_that_cannot_be_made_turns_the_tier_off(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tier = disk(tmp_path / "file" / "folder", 4)
    assert tier.is_off
    tier.close()


def test_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep me")
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / "pages").symlink_to(tmp_path / "precious")
    tier = disk(tmp_path / "tier", 4)
    assert tier.is_off
    tier.close()
    assert (tmp_path / "precious").read_text() == "keep me"


def test_failing_read_turns_the_tier_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk(tmp_path, 4)
    tier.put(name(1), page(1))

    def preadv(*args: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    assert not get(tier, 1)
    assert tier.is_off and tier.take_lost() == [name(1)]
    tier.close()
