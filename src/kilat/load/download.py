"""Downloads one file: resumed after an interruption, checked by size and SHA-256, moved into place only when right."""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import unquote, urlsplit

import httpx

from kilat.base.errors import SourceError
from kilat.load.files import RemoteFile

CHUNK_BYTES: Final = 1 << 20
# Attempts in a row that gain less than GAIN_BYTES before a download is given up.
MAX_FAILURES: Final = 5
GAIN_BYTES: Final = 1 << 20
_RETRY_STATUS: Final = frozenset({408, 425, 429, 500, 502, 503, 504})


class Progress(Protocol):
    """Hears about bytes; ``start`` may be called again for the next piece of work."""

    def start(self, label: str, total_bytes: int) -> None: ...

    def advance(self, n_bytes: int) -> None:
        """``n_bytes`` more are done; negative when damaged bytes were thrown away."""
        ...

    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Fetcher:
    """How files are fetched: the client, who hears of progress, and how to wait between attempts (seconds)."""

    client: httpx.Client
    progress: Progress
    sleep: Callable[[float], None] = time.sleep


def fetch(fetcher: Fetcher, url: str, file: RemoteFile, folder: Path) -> Path:
    """``folder/file.name`` with exactly the bytes of ``file``; bytes of an earlier attempt are kept in ``<name>.part``.

    A file whose hash is wrong is deleted and fetched once more. Raises SourceError. The caller holds the lock on ``folder``'s
    files of this name.
    """
    part = folder / f"{file.name}.part"
    for _ in range(2):
        if urlsplit(url).scheme == "file":
            _copy(fetcher, Path(unquote(urlsplit(url).path)), part)
        else:
            _complete(fetcher, url, file, part)
        got = file_sha256(part)
        if got == file.sha256:
            os.replace(part, folder / file.name)
            return folder / file.name
        fetcher.progress.advance(-part.stat().st_size)
        part.unlink()
    raise SourceError(
        f"{file.name} from {urlsplit(url).hostname or 'a local folder'} has SHA-256 {got}, expected {file.sha256}, twice in a row: "
        "the index serves another file; use another index-url or give a model directory or .gguf file"
    )


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(fetcher: Fetcher, source: Path, part: Path) -> None:
    with open(source, "rb") as file, open(part, "wb") as out:
        while chunk := file.read(CHUNK_BYTES):
            out.write(chunk)
            fetcher.progress.advance(len(chunk))


def _complete(fetcher: Fetcher, url: str, file: RemoteFile, part: Path) -> None:
    """Fetch until ``part`` has all bytes; dropped connections and busy servers are waited out."""
    failures = 0
    reason = "the connection ended early"
    have = _size(part)
    fetcher.progress.advance(have)
    while have != file.n_bytes:
        try:
            _stream(fetcher, url, file, part)
        except httpx.TransportError as error:
            reason = f"{type(error).__name__} {error}"
        now = _size(part)
        if now == file.n_bytes:
            return
        failures = 0 if now - have >= GAIN_BYTES else failures + 1
        have = now
        if failures >= MAX_FAILURES:
            raise SourceError(
                f"download of {file.name} from {urlsplit(url).hostname} stopped at {have} of {file.n_bytes} bytes ({reason}): "
                "check the network and start again, it goes on where it stopped"
            )
        fetcher.sleep(min(0.5 * 2**failures, 8.0))


def _stream(fetcher: Fetcher, url: str, file: RemoteFile, part: Path) -> None:
    """One request for the missing rest; appends to ``part`` what arrives."""
    have = _size(part)
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with fetcher.client.stream("GET", url, headers=headers) as response:
        if response.status_code in _RETRY_STATUS:
            raise httpx.ReadError(f"HTTP status {response.status_code}")
        if response.status_code not in (200, 206, 416):
            raise SourceError(
                f"{urlsplit(url).hostname} answered HTTP status {response.status_code} for {file.name}: check pip's index-url"
            )
        start, total = _range(response, file.n_bytes)
        if total != file.n_bytes:
            raise SourceError(
                f"{file.name} from {urlsplit(url).hostname} has {total} bytes, expected {file.n_bytes}: the index serves another file"
            )
        if start != have:  # the server ignored or refused the range
            fetcher.progress.advance(-have)
            part.unlink(missing_ok=True)
        if start == 0 or start == have:
            _append(fetcher, response, file, part)


def _append(fetcher: Fetcher, response: httpx.Response, file: RemoteFile, part: Path) -> None:
    with open(part, "ab") as out:
        for chunk in response.iter_raw():
            if out.tell() + len(chunk) > file.n_bytes:
                raise SourceError(
                    f"{file.name} is longer than its {file.n_bytes} bytes: the index serves another file"
                )
            out.write(chunk)
            fetcher.progress.advance(len(chunk))


def _range(response: httpx.Response, n_bytes: int) -> tuple[int, int]:
    """(first byte, size of the whole file) of an answer; (-1, size) when it carries no bytes of the file."""
    if response.status_code == 200:
        return 0, int(response.headers.get("content-length", n_bytes))
    unit, _, span = response.headers.get("content-range", "").partition(" ")
    span, _, total = span.partition("/")
    if response.status_code == 416 or unit != "bytes" or not span.partition("-")[0].isdigit():
        return -1, int(total) if total.isdigit() else n_bytes
    return int(span.partition("-")[0]), int(total) if total.isdigit() else n_bytes


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
