"""The journal of a batch run: finished rows are appended to OUT, and a header file beside it says which input
they belong to.

OUT is the journal itself. Rows are only ever appended, one line in one write, so a killed run leaves whole
rows and at most one torn line at the end, which the next run cuts off. The header is written before the first
row and replaced as a whole.
"""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kilat.base.errors import ConfigError, KilatError

HEADER_SUFFIX = ".journal"
SCAN_BYTES = 1 << 20


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the rows of OUT were made from. A run only goes on with an OUT of the same identity."""

    input_sha256: str
    n_rows: int
    model: str | None
    version: int = 1


class _Row(msgspec.Struct):
    custom_id: str
    error: Any = None


class WriteAll(Protocol):
    def __call__(self, fd: int, data: bytes, /) -> int: ...


@dataclass(slots=True)
class Journal:
    """An open OUT file, locked against other runs. ``done`` are the custom ids in it, ``failed`` those that
    are errors, ``cut_bytes`` what was cut off a torn end when it was opened.
    """

    path: Path
    done: set[str]
    failed: set[str]
    cut_bytes: int
    _fd: int
    _size: int
    _synced: int
    _write: WriteAll

    def append(self, row: dict[str, Any]) -> None:
        """Add a finished row (with ``custom_id`` and ``error``). It survives a kill of this process at once,
        and a loss of power after :meth:`sync`. Raises KilatError when the disk refuses it; the file then ends
        with the row before.
        """
        data = _line(row)
        at = 0
        try:
            while at < len(data):
                at += self._write(self._fd, data[at:])
        except OSError as e:
            os.ftruncate(self._fd, self._size)
            raise KilatError(
                f"{self.path.name} could not be written ({e.strerror}): make room and run the same command again",
                code="disk",
            ) from e
        self._size += len(data)
        self.done.add(row["custom_id"])
        if row["error"] is not None:
            self.failed.add(row["custom_id"])

    def sync(self) -> None:
        """Force all rows appended so far to the disk. May run in another thread than :meth:`append`."""
        size = self._size
        if size > self._synced:
            os.fsync(self._fd)
            self._synced = size

    def close(self) -> None:
        """Sync and unlock."""
        self.sync()
        os.close(self._fd)


def open_journal(path: Path, identity: Identity, *, write: WriteAll = os.write) -> Journal:
    """Open or create OUT for the rows of ``identity`` and cut off a torn last line. The caller closes the
    journal.

    Raises ConfigError when OUT belongs to another input or model, was not written by a batch run, is damaged
    in the middle, or is being written by another run.
    """
    fd = _open(path)
    try:
        _lock(fd, path)
        size = os.fstat(fd).st_size
        header = _read_header(path)
        if size and header is None:
            raise ConfigError(
                f"{path.name} exists and has no {path.name}{HEADER_SUFFIX}: choose another OUT, or remove it"
            )
        if size and header != identity:
            raise ConfigError(_mismatch(path, header, identity))
        if header != identity:
            _write_header(path, identity)
        done, failed, keep = _scan(fd, path)
        if keep < size:
            os.ftruncate(fd, keep)
            os.fsync(fd)
    except BaseException:
        os.close(fd)
        raise
    return Journal(path, done, failed, size - keep, fd, keep, keep, write)


def _line(row: dict[str, Any]) -> bytes:
    """One line of JSON, also for readers that take U+0085, U+2028 and U+2029 for ends of lines (Python's
    str.splitlines).
    """
    data = msgspec.json.encode(row)
    for raw, escaped in (
        (b"\xc2\x85", b"\\u0085"),
        (b"\xe2\x80\xa8", b"\\u2028"),
        (b"\xe2\x80\xa9", b"\\u2029"),
    ):
        data = data.replace(raw, escaped)
    return data + b"\n"


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as e:
        raise ConfigError(f"{path} cannot be opened for writing ({e.strerror}): choose another OUT") from e


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        raise ConfigError(
            f"{path.name} is being written by another run: wait for it, or choose another OUT"
        ) from e


def _header_path(path: Path) -> Path:
    return path.with_name(path.name + HEADER_SUFFIX)


def _read_header(path: Path) -> Identity | None:
    try:
        return msgspec.json.decode(_header_path(path).read_bytes(), type=Identity)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as e:
        raise ConfigError(
            f"{path.name}{HEADER_SUFFIX} is damaged ({e}): remove it and {path.name} to start again"
        ) from e


def _write_header(path: Path, identity: Identity) -> None:
    new = path.with_name(path.name + HEADER_SUFFIX + ".new")
    with open(new, "wb") as f:
        f.write(msgspec.json.encode(identity) + b"\n")
        f.flush()
        os.fsync(f.fileno())
    os.replace(new, _header_path(path))
    folder = os.open(path.parent, os.O_RDONLY)  # the names of OUT and of its header must survive too
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _mismatch(path: Path, header: Identity | None, identity: Identity) -> str:
    if header is not None and header.input_sha256 == identity.input_sha256:
        return (
            f"{path.name} was begun with model {header.model}, got {identity.model}: use the first, or choose "
            "another OUT"
        )
    return f"the input has changed since {path.name} was begun: bring the old one back, or choose another OUT"


def _scan(fd: int, path: Path) -> tuple[set[str], set[str], int]:
    """Ids of the whole rows in the file, ids of those that are errors, and the number of bytes they take."""
    done: set[str] = set()
    failed: set[str] = set()
    at, bad = 0, None
    decoder = msgspec.json.Decoder(_Row)
    with open(fd, "rb", buffering=SCAN_BYTES, closefd=False) as f:
        f.seek(0)
        for n, line in enumerate(f, 1):
            row = _decode(decoder, line)
            if row is None:
                bad = bad or n
                continue
            if bad is not None:
                raise ConfigError(
                    f"{path.name} is damaged at line {bad}: remove that line, or choose another OUT"
                )
            if row.custom_id in done:
                raise ConfigError(
                    f"{path.name} has row {row.custom_id!r} twice, again at line {n}: remove one of them"
                )
            done.add(row.custom_id)
            if row.error is not None:
                failed.add(row.custom_id)
            at += len(line)
    return done, failed, at


def _decode(decoder: "msgspec.json.Decoder[_Row]", line: bytes) -> _Row | None:
    if not line.endswith(b"\n"):
        return None
    try:
        return decoder.decode(line)
    except msgspec.MsgspecError:
        return None
