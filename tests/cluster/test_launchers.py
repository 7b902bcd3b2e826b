"""What all launchers promise, with real processes: how a worker begins and ends, and that one never stays behind."""

import asyncio
import importlib.util
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from served import alive

from kilat.base.errors import EngineError
from kilat.cluster.config import Place, RayConfig, ServeConfig
from kilat.cluster.launchers.launcher import Handle, Launcher
from kilat.cluster.launchers.local import LocalLauncher
from kilat.cluster.launchers.ray_launcher import RayLauncher
from kilat.cluster.worker_config import WorkerConfig

pytestmark = pytest.mark.cluster

HAS_RAY = importlib.util.find_spec("ray") is not None
PLACES = [Place("worker-0", 1.0, 1.0), Place("worker-1", 1.0, 1.0)]
# Takes its configuration away as a worker does, says that it is there, then does what the configuration's engine says.
PROGRAM = """
import json, os, signal, sys, time
settings = json.load(open(sys.argv[1]))
os.unlink(sys.argv[1])
assert settings["parent_pid"] == os.getppid()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
open(settings["engine"]["mark"], "x").close()
if "exit" in settings["engine"]:
    sys.exit(settings["engine"]["exit"])
time.sleep(600)
"""


@pytest.fixture(
    params=[
        "local",
        pytest.param("ray", marks=pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")),
    ]
)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Names the launcher; of Ray, an instance is there."""
    if request.param == "ray":
        request.getfixturevalue("ray_head")
    yield request.param


class Yard:
    """A launcher and a folder to see in what its workers did."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self.launcher = launcher
        self.folder = folder
        self._n = 0

    async def start(self, place: int = 0, **engine: object) -> Handle:
        """Start a worker, and wait until it runs."""
        self._n += 1
        mark = self.folder / f"mark{self._n}"
        config = WorkerConfig(
            address="ipc://nowhere",
            secret="s",
            worker_id=f"{PLACES[place].name}.{self._n}",
            engine=msgspec.Raw(msgspec.json.encode({"mark": str(mark), **engine})),
        )
        handle = await asyncio.wait_for(self.launcher.start(PLACES[place], config), 60)
        await until(mark.exists)
        return handle


async def until(condition: object) -> None:
    async with asyncio.timeout(30):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


@asynccontextmanager
async def yard(kind: str, folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[Yard]:
    command = [sys.executable, "-c", PROGRAM]
    if kind == "local":
        launcher: Launcher = LocalLauncher(command, folder)
    else:
        ray = RayConfig(address=request.getfixturevalue("ray_head").address)
        config = ServeConfig(files=None, engine=None, served_model_name="m", workers=2, ray=ray)  # type: ignore[arg-type]
        launcher = RayLauncher(config, command[1:], PLACES)
    try:
        yield Yard(launcher, folder)
    finally:
        await asyncio.wait_for(launcher.close(), 30)


async def ends(handle: Handle) -> int | None:
    return await asyncio.wait_for(handle.wait(), 20)


async def test_each_end_of_a_worker_is_told_as_it_was_and_a_new_one_starts_in_its_place(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with yard(kind, tmp_path, request) as y:
        for code in (0, 7):
            assert await ends(await y.start(exit=code)) == code
        asked, killed, frozen = await y.start(), await y.start(1), None
        assert alive(asked.pid) and not asked.ended and not asked.blind
        asked.terminate()
        assert await ends(asked) == 3 and asked.ended
        os.kill(killed.pid, signal.SIGKILL)
        assert await ends(killed) == -signal.SIGKILL
        assert not alive(asked.pid) and not alive(killed.pid)
        frozen, other = await y.start(), await y.start(1)
        os.kill(frozen.pid, signal.SIGSTOP)
        frozen.kill()
        assert await ends(frozen) == -signal.SIGKILL
        assert alive(other.pid), "the others go on"
        other.kill()
        assert await ends(other) == -signal.SIGKILL
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".json"] == []


async def test_worker_that_is_not_wanted_any_more_while_it_starts_leaves_no_process(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with yard(kind, tmp_path, request) as y:
        before = await y.start(1)
        starting = asyncio.create_task(y.start())
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait((starting,))
        later = await y.start()  # in the same place: it is free again
        later.kill()
        before.kill()
        assert await ends(later) == await ends(before) == -signal.SIGKILL


@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
async def test_ray_that_is_not_there_is_an_error_with_its_address(tmp_path: Path) -> None:
    ray = RayConfig(address="127.0.0.1:1")
    config = ServeConfig(files=None, engine=None, served_model_name="m", ray=ray)  # type: ignore[arg-type]
    launcher = RayLauncher(config, ["-c", ""], PLACES[:1])
    with pytest.raises(EngineError, match=r"'127\.0\.0\.1:1' cannot be used: .*refused"):
        await asyncio.wait_for(Yard(launcher, tmp_path).start(), 60)
    await launcher.close()


@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
async def test_worker_that_ends_at_once_has_ended_though_both_were_told_in_one_breath() -> None:
    config = ServeConfig(files=None, engine=None, served_model_name="m", workers=2, ray=RayConfig())  # type: ignore[arg-type]
    worker = WorkerConfig(
        address="ipc://nowhere", secret="s", worker_id="worker-1.x", engine=msgspec.Raw(b"{}")
    )
    script = (
        'import sys; sys.stdin.readline(); print(\'{"type":"up"}\', flush=True); sys.stdin.readline();'
        'print(\'{"type":"started","key":"worker-1.x","pid":1,"folder":"f","host":"h"}\\n\''
        '\'{"type":"exited","key":"worker-1.x","code":5}\', flush=True); sys.stdin.read()'
    )
    launcher = RayLauncher(config, ["-c", ""], PLACES, driver=(sys.executable, "-c", script))
    handle = await asyncio.wait_for(launcher.start(PLACES[1], worker), 20)
    assert await ends(handle) == 5
    await launcher.close()
