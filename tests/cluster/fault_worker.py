"""A worker process that comes to harm at a given moment: ``python fault_worker.py CONFIG.json``. Only tests and measurements start it.

Settings: ``engine``, those of SchedEngine, or None for a real engine around a tiny model; ``folder``, where a file ``mark`` may appear. Who
finds it at the moment that it names takes it away and does to itself what it says, so that it happens to one worker once.

    submitted, mid_prompt, first_token (before anybody was told), told (before the offer), offered, reading, adopted, decoding
"""

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Harm:
    """Looks for a mark, and does what it says."""

    def __init__(self, folder: Path) -> None:
        self._mark = folder / "mark"

    def wanted(self) -> dict[str, Any] | None:
        """The mark that is there now."""
        try:
            return json.loads(self._mark.read_text())
        except (OSError, ValueError):
            return None

    def do(self, mark: dict[str, Any]) -> None:
        """Take the mark and come to harm; nothing when somebody else was quicker."""
        try:
            os.rename(self._mark, self._mark.with_name(f"done-{mark['id']}"))
        except OSError:
            return
        if mark.get("later_s"):
            threading.Timer(mark["later_s"], _suffer, (mark["how"],)).start()
        else:
            _suffer(mark["how"])


def _suffer(how: str) -> None:
    if how in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    else:
        cut({"link": socket.AF_UNIX, "pages": socket.AF_INET}[how])


def cut(family: int) -> int:
    """Shut all connections of this process of a family; returns how many."""
    n = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with one:
            try:
                if one.family == family and one.getpeername():
                    one.shutdown(socket.SHUT_RDWR)
                    n += 1
            except OSError:
                continue
    return n


class Endangered:
    """An engine that looks for marks where its sessions get on."""

    def __init__(self, engine: Any, harm: Harm) -> None:
        self._engine = engine
        self._harm = harm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, record: Any, arrived: Any = None, *, hand_over: bool = False) -> None:
        self._engine.submit(record, arrived, hand_over=hand_over)
        self._at(
            "adopted" if arrived is not None else "submitted",
            lambda mark: mark["prompt"] == record.prompt_ids,
        )

    def step(self) -> list[Any]:
        events = self._engine.step()
        if any(e.token_ids for e in events):
            self._at("first_token", lambda mark: self._is_at(mark, 1, 1))
            self._at("decoding", lambda mark: self._is_at(mark, mark["n_out"], 1 << 30))
        self._at("mid_prompt", self._is_mid_prompt)
        return events

    def take_frozen(self) -> list[str]:
        ids = self._engine.take_frozen()
        if ids:
            self._at("told", lambda mark: any(self._is(mark, i) for i in ids))
        return ids

    def depart(self, session_id: str) -> Any:
        departed = self._engine.depart(session_id)
        self._at("offered", lambda mark: mark["prompt"] == departed.record.prompt_ids)
        return departed

    def _at(self, moment: str, fits: Callable[[dict[str, Any]], bool]) -> None:
        mark = self._harm.wanted()
        if mark is not None and mark["moment"] == moment and fits(mark):
            self._harm.do(mark)

    def _sessions(self) -> dict[str, Any]:
        return self._engine.scheduler._roster.live

    def _is(self, mark: dict[str, Any], session_id: str) -> bool:
        s = self._sessions().get(session_id)
        return s is not None and s.record.prompt_ids == mark["prompt"]

    def _is_at(self, mark: dict[str, Any], low: int, high: int) -> bool:
        return any(
            self._is(mark, i) and low <= len(s.tokens) - s.n_prompt <= high
            for i, s in self._sessions().items()
        )

    def _is_mid_prompt(self, mark: dict[str, Any]) -> bool:
        return any(self._is(mark, i) and 0 < s.n_computed < s.n_prompt for i, s in self._sessions().items())


class EndangeredRoad:
    """A transport that looks for a mark when it begins to read."""

    def __init__(self, transport: Any, harm: Harm) -> None:
        self._transport = transport
        self._harm = harm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def read(self, *args: Any) -> int:
        ticket = self._transport.read(*args)
        mark = self._harm.wanted()
        if mark is not None and mark["moment"] == "reading":
            self._harm.do(mark)
        return ticket


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from dataclasses import replace

    from kilat.cluster.worker.main import run_worker
    from kilat.cluster.worker.roads import open_roads

    settings: dict[str, Any] = {}

    def make(raw: bytes) -> Any:
        settings.update(json.loads(raw))
        return Endangered(_engine(settings["engine"]), Harm(Path(settings["folder"])))

    def roads(config: Any, memory: Any) -> Any:
        made = open_roads(config, memory)
        harm = Harm(Path(settings["folder"]))
        return replace(made, transports=[EndangeredRoad(t, harm) for t in made.transports])

    return run_worker(Path(sys.argv[1]), make, roads)


def _engine(settings: dict[str, Any] | None) -> Any:
    if settings is not None:
        from sched_engine import SchedEngine

        return SchedEngine(**settings)
    from tests.engine.harness import make_engine, tiny_model

    return make_engine(tiny_model(), shared=True, n_pages=256, step_tokens=32)


if __name__ == "__main__":
    sys.exit(main())
