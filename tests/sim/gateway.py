"""The real dispatcher of the gateway as the ``Control`` of a simulated cluster."""

from dataclasses import dataclass, field

from msgspec.structs import replace

from kilat.base.errors import KilatError, PeerError
from kilat.base.ids import branch_id
from kilat.cluster.gateway.dispatch import Dispatcher
from kilat.cluster.gateway.placing import DispatchConfig
from kilat.cluster.gateway.roles import role_worker
from kilat.cluster.gateway.sessions import Inbox, SessionTable
from kilat.cluster.gateway.workers import WorkerState
from kilat.policy.route.config import RouterConfig
from kilat.policy.route.router import Router
from kilat.policy.scale.roles import RoleScaler
from kilat.policy.scale.window import Window
from kilat.sim.cluster import Effects, End, Weights
from kilat.wire import messages as wire
from kilat.wire.messages import SessionEvent
from kilat.wire.session import SessionRecord


@dataclass
class Stream:
    """Times of one sample as its reader sees them; ``error`` when it ended before its time."""

    asked_s: float
    token_ids: list[int] = field(default_factory=list)
    first_s: float | None = None
    last_s: float = 0.0
    error: KilatError | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.asked_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time between tokens; None before the second one."""
        n = len(self.token_ids)
        return None if self.first_s is None or n < 2 else (self.last_s - self.first_s) / (n - 1)


class Reader(Inbox):
    """Takes what a request gets, at once: tokens and the end of each of its samples."""

    __slots__ = ("_gateway", "_names", "has_failed", "heard", "streams")

    def __init__(self, record: SessionRecord, gateway: "Gateway") -> None:
        super().__init__()
        self._gateway = gateway
        self._names = [branch_id(record.session_id, k) for k in range(record.params.n)]
        self.streams = [Stream(gateway.now_s) for _ in self._names]
        self.heard: set[str] = set()
        self.has_failed = False

    def push(self, index: int, event: SessionEvent) -> bool:
        if self.has_failed:
            return False
        stream = self.streams[index]
        if event.token_ids:
            before_s, stream.last_s = stream.last_s, self._gateway.now_s
            if stream.first_s is None:
                stream.first_s = stream.last_s
                self._gateway.ttft_s.append(stream.first_s - stream.asked_s)
            else:
                self._gateway.heard(self._names[index], before_s, len(event.token_ids))
            stream.token_ids += event.token_ids
        if event.finish is not None:
            ended = event.finish in ("stop", "length")
            self._end(index, None if ended else PeerError(f"ended by {event.finish}"))
        return True

    def fail(self, error: KilatError) -> None:
        """The request ends with an error: so do all of its samples that have not ended."""
        self.has_failed = True
        for index, name in enumerate(self._names):
            if name not in self.heard:
                self._end(index, error)

    def _end(self, index: int, error: KilatError | None) -> None:
        self.heard.add(self._names[index])
        self.streams[index].error = error
        self._gateway.ended.append((self._names[index], End(self.streams[index].token_ids, error)))


class Gateway:
    """What the processes of the gateway do around the dispatcher, without processes. With ``scaler`` shares are looked at every
    ``window_s``. ``readers``: by session id; ``ended``: every end of a sample, in order."""

    def __init__(
        self,
        *,
        router: RouterConfig | None = None,
        rescue_s: float = 5.0,
        scaler: RoleScaler | None = None,
        window_s: float = 1.0,
    ) -> None:
        self.router = Router(router)
        self.table = SessionTable()
        self.dispatcher = Dispatcher(self.router, self.table, DispatchConfig(rescue_s=rescue_s))
        self.scaler = scaler
        self.window_s = window_s
        self.now_s = 0.0
        self.ended: list[tuple[str, End]] = []
        self.readers: dict[str, Reader] = {}
        self.ttft_s: list[float] = []
        self.tpot_s: dict[str, tuple[float, int]] = {}
        self.prompts: list[int] = []
        self.changes: list[tuple[float, dict[str, Weights]]] = []
        self._next_window_s = window_s

    def expect(self, worker_id: str, name: str, weights: Weights, now_s: float) -> None:
        self.dispatcher.expect(WorkerState(worker_id, name, weights, now_s))

    def lost(self, worker_id: str, now_s: float) -> Effects:
        return self.dispatcher.lost(worker_id, PeerError("the worker died"), now_s)

    def on_message(self, worker_id: str, message: wire.FromWorker, now_s: float) -> Effects:
        self.now_s = now_s
        effects = list(self.dispatcher.on_message(worker_id, message, now_s))
        if isinstance(message, wire.Status) and self.dispatcher.workers.get(worker_id) is not None:
            seq = message.pages_seq
            if not self.router.index.confirm(worker_id, seq):
                effects.append((worker_id, wire.Resync()))
        return effects

    def submit(self, record: SessionRecord, now_s: float) -> Effects:
        self.now_s = now_s
        reader = Reader(record, self)
        effects = self.dispatcher.submit(replace(record, arrival_s=now_s), reader, 0, now_s)
        self.readers[record.session_id] = reader
        self.prompts.append(len(record.prompt_ids))
        return effects

    def cancel(self, session_id: str, n: int, now_s: float) -> Effects:
        branches = [branch_id(session_id, k) for k in range(n)]
        return self.dispatcher.cancel(branches, now_s, abort_as=session_id)

    def retire(self, worker_id: str, now_s: float) -> Effects:
        return self.dispatcher.retire(worker_id, now_s)

    def tick(self, now_s: float) -> Effects:
        if self.scaler is not None and now_s >= self._next_window_s:
            self._next_window_s = now_s + self.window_s
            self._scale(self.scaler, now_s)
        return self.dispatcher.tick(now_s)

    def heard(self, name: str, before_s: float, n_tokens: int) -> None:
        """A stream has got tokens, the last time before that at ``before_s``."""
        seconds, n = self.tpot_s.get(name, (0.0, 0))
        self.tpot_s[name] = seconds + self.now_s - before_s, n + n_tokens

    def _scale(self, scaler: RoleScaler, now_s: float) -> None:
        hello = self.dispatcher.workers.hello
        page_tokens = hello.page_tokens if hello is not None else 1
        workers = [role_worker(v, page_tokens) for v in self.dispatcher.views()]
        tpot_s = [seconds / n for seconds, n in self.tpot_s.values()]
        window = Window(workers, self.window_s, self.prompts, self.ttft_s, tpot_s)
        self.ttft_s, self.tpot_s, self.prompts = [], {}, []
        for worker_id, weights in (scaler.on_window(window, now_s) or {}).items():
            worker = self.dispatcher.workers.get(worker_id)
            worker.prefill_weight, worker.decode_weight = weights
            self.changes.append((now_s, {worker.name: weights}))

    def ends(self) -> list[tuple[str, End]]:
        return self.ended

    def held_pages(self, worker_id: str) -> set[bytes]:
        return set(self.router.index.names(worker_id))

    def leftovers(self) -> list[str]:
        left = []
        if len(self.dispatcher):
            left.append(f"{len(self.dispatcher)} sessions are still under way in the gateway")
        if len(self.dispatcher.moves):
            left.append(f"{len(self.dispatcher.moves)} moves are still open in the gateway")
        if len(self.table):
            left.append(f"{len(self.table)} samples still wait in the session table")
        return left
