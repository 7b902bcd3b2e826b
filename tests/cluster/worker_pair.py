"""Worker loops in threads of this process, whose messages a test reads and writes by hand."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from msgspec.structs import replace
from sched_engine import SchedEngine

from kilat.base import metrics
from kilat.base.ids import branch_id
from kilat.cluster.worker.beat import Pulse
from kilat.cluster.worker.loop import WorkerLoop
from kilat.cluster.worker.mover import Roads
from kilat.kv.board import Board
from kilat.kv.local import LocalHub, LocalTransport
from kilat.kv.shm import ShmTransport
from kilat.kv.tcp import TcpTransport
from kilat.kv.transport import Pages, Transport
from kilat.wire.messages import (
    Adopt,
    Drain,
    Fetch,
    Fetched,
    FromWorker,
    Hello,
    Offered,
    Peers,
    Release,
    StepEvents,
    Submit,
    ToWorker,
)
from kilat.wire.session import SessionRecord
from tests.policy.sched.fakes import alone

LIMIT_S = 20.0
KINDS = ["local", "shm", "tcp"]
PROMPT = [k % 7 for k in range(45)]
SECRET = b"secret"

_M = TypeVar("_M", bound=FromWorker)


class QueueChannel:
    """A channel whose other end is two queues."""

    def __init__(self) -> None:
        self.to_worker: queue.SimpleQueue[ToWorker] = queue.SimpleQueue()
        self.sent: list[FromWorker] = []
        self.news = threading.Condition()

    def send(self, message: FromWorker) -> None:
        with self.news:
            self.sent.append(message)
            self.news.notify_all()

    def receive(self, timeout_s: float) -> list[ToWorker]:
        out: list[ToWorker] = []
        try:
            out.append(self.to_worker.get(timeout=timeout_s) if timeout_s else self.to_worker.get_nowait())
            while True:
                out.append(self.to_worker.get_nowait())
        except queue.Empty:
            return out


class Worker:
    """A worker loop over a :class:`SchedEngine`, or another ``engine``. ``transport``: ``local``, ``shm``, ``tcp``, what makes one, or None
    for no way at all."""

    def __init__(
        self,
        name: str,
        hub: LocalHub,
        transport: str | Callable[[Pages, Board], Transport] | None,
        *,
        offer_s: float = 20.0,
        engine: Any = None,
        **settings: Any,
    ) -> None:
        self.name = name
        self.engine: Any = engine or SchedEngine(**settings)
        self.channel = QueueChannel()
        roads = self._roads(hub, transport)
        self.loop = WorkerLoop(name, self.engine, self.channel, Pulse(), roads, offer_s=offer_s)  # type: ignore[arg-type]
        self.error: BaseException | None = None
        self._read = 0
        self._thread = threading.Thread(target=self._run, name=f"worker {name}")
        self._thread.start()
        self.hello = self.wait(Hello)

    def _roads(
        self, hub: LocalHub, transport: str | Callable[[Pages, Board], Transport] | None
    ) -> Roads | None:
        if transport is None:
            return None
        memory, board = self.engine.pages, Board()
        pages = Pages(memory.layout, memory.view, memory.fd)
        if callable(transport):
            made = transport(pages, board)
        elif transport == "local":
            made = LocalTransport(hub, pages, board)
        else:
            made = ShmTransport(pages, board) if transport == "shm" else TcpTransport(pages, board, SECRET)
        return Roads([made], board, memory.layout)

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as e:
            self.error = e
            with self.channel.news:
                self.channel.news.notify_all()
        finally:
            self.loop.close()

    def tell(self, *messages: ToWorker) -> None:
        for message in messages:
            self.channel.to_worker.put(message)

    def wait(self, kind: type[_M], when: Callable[[_M], bool] = lambda m: True) -> _M:
        """The next message of ``kind`` for which ``when`` holds; those before it are skipped."""
        with self.channel.news:
            found: list[_M] = []

            def there() -> bool:
                if self.error is not None:
                    raise AssertionError("the loop broke") from self.error
                while self._read < len(self.channel.sent) and not found:
                    message = self.channel.sent[self._read]
                    self._read += 1
                    if isinstance(message, kind) and when(message):
                        found.append(message)
                return bool(found)

            if not self.channel.news.wait_for(there, LIMIT_S):
                raise TimeoutError(f"no {kind.__name__} from worker {self.name}")
            return found[0]

    def all(self, kind: type[_M]) -> list[_M]:
        """All messages of a kind so far."""
        with self.channel.news:
            return [m for m in self.channel.sent if isinstance(m, kind)]

    def tokens(self, session_id: str) -> list[int]:
        """What the worker has said of a session."""
        events = [e for m in self.all(StepEvents) for e in m.events if e.session_id == session_id]
        return [t for e in events for t in e.token_ids]

    def until(self, what: Callable[[], bool]) -> None:
        """Wait for something that no message tells."""
        until_s = time.monotonic() + LIMIT_S
        while not what():
            if self.error is not None:
                raise AssertionError("the loop broke") from self.error
            assert time.monotonic() < until_s, f"worker {self.name}: does not come about"
            time.sleep(0.001)

    def wait_end(self, session_id: str) -> str:
        """How a session ended."""

        def ends(m: StepEvents) -> bool:
            return any(e.session_id == session_id and e.finish for e in m.events)

        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            for m in self.all(StepEvents):
                for e in m.events:
                    if e.session_id == session_id and e.finish:
                        return e.finish
            self.until(lambda: True)
            time.sleep(0.001)
        raise TimeoutError(f"{session_id} does not end at worker {self.name}")

    @property
    def n_pinned(self) -> float:
        return self.engine.gauges()[metrics.PAGES_PINNED]

    def stop(self) -> None:
        """Drain at once; the loop must end."""
        if isinstance(self.engine, SchedEngine):
            self.engine.gate.set()
        self.tell(Drain(0.0))
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        assert self.error is None, self.error


def introduce(*workers: Worker) -> None:
    """Tell all workers of each other."""
    endpoints = {w.name: w.hello.endpoints for w in workers}
    for w in workers:
        w.tell(Peers(endpoints))


Start = Callable[..., Worker]


def pair(start: Start, transport: Any = "local", **settings: Any) -> tuple[Worker, Worker]:
    p, d = start("p", transport, **settings), start("d", transport, **settings)
    introduce(p, d)
    return p, d


def hand_over(p: Worker, d: Worker, r: SessionRecord) -> tuple[list[Offered], list[Fetched]]:
    """What a gateway does: from the submission to the last release. Returns the offers and the reports."""
    p.tell(Submit(r, hand_over=True))
    offers: list[Offered] = []
    while not offers or offers[-1].record is None:
        offers.append(p.wait(Offered, lambda m: m.session_id == r.session_id))
        if offers[-1].record is None:
            d.tell(Fetch(r.session_id, offers[-1].offer))
    adopt(d, offers[-1])
    fetched = [d.wait(Fetched) for _ in offers]
    p.tell(Release([f.move_id for f in fetched]))
    return offers, fetched


def adopt(d: Worker, offered: Offered) -> None:
    assert offered.record is not None
    d.tell(Adopt(replace(offered.record, epoch=offered.record.epoch + 1), offered.offer))


def check_same(r: SessionRecord, *workers: Worker) -> None:
    """All samples said what they say alone, whoever said it."""
    for k in range(r.params.n):
        sample = branch_id(r.session_id, k)
        workers[-1].wait_end(sample)
        said = [t for w in workers for t in w.tokens(sample)]
        assert said == alone(r, k, 128)[0], sample


def check_clean(*workers: Worker) -> None:
    """No page is pinned, and the loop goes on."""
    for w in workers:
        w.until(lambda w=w: w.n_pinned == 0)  # type: ignore[misc]
