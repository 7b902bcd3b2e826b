"""The gateway's part for two workers of ``cuda_cluster.py``: starts them, passes their messages on, and keeps what they say."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec.structs import replace

from kilat.base.hashing import root_hash
from kilat.base.ids import branch_id
from kilat.cluster.worker_config import WorkerConfig, write_config
from kilat.engine.config import EngineConfig
from kilat.policy.cache.table import extend_chain
from kilat.wire import codec
from kilat.wire.kv import Offer
from kilat.wire.messages import (
    Adopt,
    Fatal,
    Fetch,
    Fetched,
    FromWorker,
    Hello,
    Lend,
    Offered,
    Peers,
    Refused,
    Release,
    SessionEvent,
    StepEvents,
    Submit,
    ToWorker,
)
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SessionRecord

SECRET = "of this measurement"
LIMIT_S = 60.0


class Gate:
    """Two workers, ``a`` and ``b``, that ``command`` and a file start. What they say is kept with the time it came."""

    def __init__(
        self, command: list[str], folder: Path, engine: EngineConfig, transports: tuple[str, ...]
    ) -> None:
        self.hello: dict[str, Hello] = {}
        self.events: dict[str, list[tuple[float, SessionEvent]]] = {}
        self.lent: dict[str, Offer] = {}
        self.target: dict[str, str] = {}
        self.fetched: list[Fetched] = []
        self.n_asked = 0
        self._owner: dict[str, str] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        address = f"ipc://{folder}/gate"
        self._socket.bind(address)
        self._children: list[subprocess.Popen[bytes]] = []
        for name in ("a", "b"):
            path = folder / f"{name}.json"
            settings = msgspec.Raw(msgspec.json.encode(engine))
            config = WorkerConfig(
                address=address,
                secret=SECRET,
                worker_id=name,
                engine=settings,
                parent_pid=os.getpid(),
                transports=transports,
                offer_s=LIMIT_S,
            )
            write_config(path, config)
            self._children.append(subprocess.Popen([*command, str(path)]))

    def start(self, settle_s: float) -> None:
        """Until both are ready and had time to prepare themselves."""
        self.pump(lambda: len(self.hello) == 2, limit_s=180.0)
        for name in ("a", "b"):
            self.send(name, Peers({w: h.endpoints for w, h in self.hello.items()}))
        self.finish(self.ask("a", [5] * 40, max_tokens=3), "a")
        self.finish(self.ask("b", [6] * 40, max_tokens=3), "b")
        time.sleep(settle_s)

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()
        self._socket.close(0)
        self._context.term()

    def send(self, worker: str, message: ToWorker) -> None:
        self._socket.send_multipart((worker.encode(), codec.encode(message)))

    def pump(self, there: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Take in messages until ``there()``. Raises TimeoutError, and RuntimeError when a worker has died."""
        until_s = time.monotonic() + limit_s
        while not there():
            if time.monotonic() > until_s:
                raise TimeoutError(f"not within {limit_s:g} s; fetched so far: {self.fetched[-3:]}")
            if self._socket.poll(200):
                name, _, frame = self._socket.recv_multipart()
                self._take(name.decode().split(".")[0], codec.decode_from_worker(frame))
            elif any(child.poll() is not None for child in self._children):
                raise RuntimeError("a worker has ended")

    def _take(self, worker: str, message: FromWorker) -> None:
        if isinstance(message, Hello):
            self.hello[worker] = message
        elif isinstance(message, StepEvents):
            now_s = time.perf_counter()
            for event in message.events:
                self.events.setdefault(event.session_id, []).append((now_s, event))
        elif isinstance(message, Offered):
            self._pass_on(worker, message)
        elif isinstance(message, Fetched):
            self.fetched.append(message)
            self.send(self._owner.pop(message.move_id), Release([message.move_id]))
        elif isinstance(message, Refused | Fatal):
            raise RuntimeError(f"worker {worker}: {message.message}")

    def _pass_on(self, worker: str, message: Offered) -> None:
        offer, record = message.offer, message.record
        self._owner[offer.move_id] = worker
        if message.session_id == offer.move_id:
            self.lent[offer.move_id] = offer
        elif record is None:
            self.send(self.target[message.session_id], Fetch(message.session_id, offer))
        else:
            record = replace(record, epoch=record.epoch + 1)
            self.send(self.target[message.session_id], Adopt(record, offer))

    # -- what the cases are made of -----------------------------------------------------------------------------------------------------

    def ask(
        self,
        worker: str,
        prompt: list[int],
        *,
        salt: str = "",
        to: str = "",
        prefix: Offer | None = None,
        **params: Any,
    ) -> SessionRecord:
        """Submit a new session; ``to``: the worker that it is handed over to."""
        self.n_asked += 1
        base = {"temperature": 0.0, "max_tokens": 8, "seed": 5, "ignore_eos": True}
        record = SessionRecord(f"s{self.n_asked}", prompt, SamplingParams(**{**base, **params}), salt=salt)
        if to:
            self.target[record.session_id] = to
        self.send(worker, Submit(record, hand_over=bool(to), prefix=prefix))
        return record

    def lend(self, prompt: list[int], salt: str = "") -> Offer:
        """What ``a`` has of the start of a prompt, pinned for ``b``."""
        hello = self.hello["a"]
        assert hello.layout is not None, "the workers have no transport in common"
        names: list[bytes] = []
        root = root_hash(hello.layout.model, salt)
        extend_chain(names, root, prompt, hello.page_tokens, len(prompt) // hello.page_tokens)
        move_id = f"lend-{len(self.lent)}"
        self.send("a", Lend(move_id, names))
        self.pump(lambda: move_id in self.lent)
        return self.lent[move_id]

    def tokens(self, sample: str) -> list[int]:
        return [t for _, event in self.events.get(sample, ()) for t in event.token_ids]

    def cached(self, sample: str) -> int:
        """Tokens of its prompt that were not computed."""
        return self.events[sample][0][1].cached_tokens

    def times(self, sample: str) -> list[float]:
        return [at_s for at_s, event in self.events.get(sample, ()) for _ in event.token_ids]

    def finish(self, record: SessionRecord, worker: str = "") -> list[list[int]]:
        """Wait for the end of all samples; their ids."""
        samples = [branch_id(record.session_id, k) for k in range(record.params.n)]
        self.pump(lambda: all(self._has_ended(s) for s in samples))
        return [self.tokens(s) for s in samples]

    def _has_ended(self, sample: str) -> bool:
        events = self.events.get(sample, [])
        return bool(events) and events[-1][1].finish is not None
