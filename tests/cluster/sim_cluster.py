"""Workers without engines or sockets around a real dispatcher: every message waits in a queue until a test lets it through.

A link keeps its order, links among each other do not. A session's tokens are a function of its seed, sample and position.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from kilat.base.errors import PeerError
from kilat.base.hashing import branch_seed, page_hash, root_hash
from kilat.base.ids import branch_id
from kilat.cluster.gateway.dispatch import Dispatcher
from kilat.cluster.gateway.placing import DispatchConfig
from kilat.cluster.gateway.sessions import Inbox, SessionTable
from kilat.cluster.gateway.workers import WorkerState
from kilat.policy.route.config import RouterConfig
from kilat.policy.route.router import Router
from kilat.wire.kv import Endpoint, KvLayout, Offer
from kilat.wire.messages import (
    Abort,
    Adopt,
    Announce,
    Export,
    Fetch,
    Fetched,
    FromWorker,
    Hello,
    Lend,
    Offered,
    PagesChanged,
    Refused,
    Release,
    Resync,
    SessionEvent,
    StepEvents,
    Submit,
    ToWorker,
)
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SessionRecord

PAGE = 4
LAYOUT = KvLayout(1, PAGE, 1, 1, "float32", 32, "sim")
POISON = 666


def token_of(seed: int, k: int, position: int) -> int:
    return (branch_seed(seed, k) + 7 * position) % 1000 + 1000


@dataclass
class SimSession:
    record: SessionRecord
    hand_over: bool
    output: list[int]
    held: "list[SimSession]" = field(default_factory=list)
    computed: int = 0
    started: bool = True


class SimWorker:
    """``pins``: what it has offered and was not released of; ``fetched``: pages it keeps for sessions to come, by move."""

    def __init__(self, cluster: "SimCluster", worker_id: str) -> None:
        self.cluster = cluster
        self.id = worker_id
        self.inbound: deque[ToWorker] = deque()
        self.outbound: deque[FromWorker] = deque()
        self.live: dict[str, SimSession] = {}
        self.pins: set[str] = set()
        self.fetched: dict[str, str] = {}
        self.names: list[bytes] = []
        self.seq = 0
        self.n_offers = 0
        self.capacity = 100
        self.outbound.append(
            Hello(
                worker_id,
                "sim",
                64,
                8,
                5000,
                PAGE,
                64,
                [],
                "none",
                {},
                LAYOUT,
                [Endpoint("sim", worker_id.encode())],
            )
        )

    def take(self) -> None:
        """One message from the gateway."""
        m = self.inbound.popleft()
        if isinstance(m, Submit):
            if m.prefix is not None:
                self._read(m.record.session_id, m.prefix)
            self._start(m.record, m.hand_over)
        elif isinstance(m, Adopt):
            if m.offer is not None:
                self._read(m.record.session_id, m.offer)
            self.fetched = {k: s for k, s in self.fetched.items() if s != m.record.session_id}
            self._start(m.record, False)
        elif isinstance(m, Fetch):
            self.fetched[m.offer.move_id] = m.session_id
            self._read(m.session_id, m.offer)
        elif isinstance(m, Abort):
            for given in m.session_ids:
                one = given.removesuffix("#0")
                ids = [one] if "#" in given else [branch_id(one, k) for k in range(4)]
                for i in ids:
                    self._gone(i)
        elif isinstance(m, Announce):
            for i in m.session_ids:
                if i in self.live and self.live[i].started:
                    s = self.live[i]
                    n_full = (len(s.record.prompt_ids) + len(s.output) - 1) // PAGE * PAGE
                    self._offer(i, s.record.epoch, 0, n_full, None)
        elif isinstance(m, Export):
            for i in m.session_ids:
                if i in self.live and self.live[i].started:
                    self._depart(i)
        elif isinstance(m, Lend):
            known = [n for n in m.names if n in self.names]
            self._offer(m.move_id, 0, 0, len(known) * PAGE, None)
        elif isinstance(m, Release):
            self.pins.difference_update(m.move_ids)
            for i in m.move_ids:
                self.fetched.pop(i, None)
        elif isinstance(m, Resync):
            self._say_pages()

    def step(self) -> None:
        """Each session gets one token further, or its prompt one page."""
        for i, s in list(self.live.items()):
            if i not in self.live or not s.started:
                continue
            if POISON in s.record.prompt_ids:
                self.cluster.kill(self.id)
                return
            if s.hand_over and s.computed < len(s.record.prompt_ids) // PAGE * PAGE:
                self._offer(i, s.record.epoch, s.computed, s.computed + PAGE, None)
                s.computed += PAGE
                continue
            seed, k = s.record.params.seed or 0, s.record.branch
            s.output.append(token_of(seed, k, len(s.output)))
            finish = "length" if len(s.output) == s.record.params.max_tokens else None
            event = SessionEvent(i, s.record.epoch, len(s.output) - 1, s.output[-1:], finish=finish)
            self.outbound.append(StepEvents(0, [event]))
            if finish is not None:
                self._gone(i)
            elif s.hand_over:
                self._depart(i)
            else:
                self._let_go(s)

    def _start(self, record: SessionRecord, hand_over: bool) -> None:
        if len(self.live) + record.n_sessions > self.capacity:
            self.outbound.append(Refused(record.session_id, "full", "overloaded", 429, True))
            return
        first = SimSession(record, hand_over, list(record.output_ids))
        for k in range(1, record.n_sessions):
            own = replace(
                record,
                session_id=branch_id(record.session_id, k),
                branch=k,
                output_ids=[],
                with_samples=False,
            )
            first.held.append(SimSession(own, hand_over, [], started=False))
        for s in (first, *first.held):
            assert s.record.session_id not in self.live, "a session was submitted twice"
            self.live[s.record.session_id] = s
        self.names += [n for n in _names(record) if n not in self.names]
        self._say_pages()

    def _let_go(self, s: SimSession) -> None:
        for h in s.held:
            h.started = True
        s.held = []

    def _gone(self, session_id: str) -> None:
        s = self.live.pop(session_id, None)
        if s is not None:
            self._let_go(s)
            for other in self.live.values():
                if s in other.held:
                    other.held.remove(s)

    def _depart(self, session_id: str) -> None:
        s = self.live.pop(session_id)
        for h in s.held:
            self.live.pop(h.record.session_id, None)
        record = replace(s.record, output_ids=list(s.output), with_samples=bool(s.held and s.output))
        n = len(s.record.prompt_ids) + len(s.output) - 1
        self._offer(session_id, s.record.epoch, 0, n, record)

    def _offer(
        self, session_id: str, epoch: int, first: int, n_tokens: int, record: SessionRecord | None
    ) -> None:
        self.n_offers += 1
        move = f"{self.id}/{self.n_offers}"
        pages = list(range(-(-(n_tokens - first) // PAGE)))
        self.pins.add(move)
        self.outbound.append(
            Offered(session_id, Offer(move, self.id, epoch, pages, first, n_tokens, 10.0), record)
        )

    def _read(self, session_id: str, offer: Offer) -> None:
        peer = self.cluster.workers.get(offer.owner)
        ok = peer is not None and offer.move_id in peer.pins
        self.outbound.append(
            Fetched(session_id, offer.move_id, ok, 32 * len(offer.pages) if ok else 0, "" if ok else "gone")
        )

    def _say_pages(self) -> None:
        self.outbound.append(PagesChanged(self.seq, list(self.names), [], whole=True))
        self.seq += 1


@dataclass
class Ask:
    """One request as its client sees it."""

    record: SessionRecord
    inbox: Inbox
    cancelled: bool = False
    stopped: set[int] = field(default_factory=set)

    def got(self) -> dict[int, list[int]]:
        """Tokens of each sample; fails when something came after an end."""
        out: dict[int, list[int]] = {}
        ended: set[int] = set()
        for k, event in self.inbox._items:
            assert k not in ended, "news after the end"
            out.setdefault(k, []).extend(event.token_ids)
            if event.finish is not None:
                ended.add(k)
        return out

    def ended(self) -> set[int]:
        return {k for k, event in self.inbox._items if event.finish is not None}


class SimCluster:
    """``weights``: of each worker that starts; a killed one may be followed by another."""

    def __init__(self, weights: list[tuple[float, float]], **config: float) -> None:
        self.now_s = 0.0
        self.table = SessionTable()
        settings = DispatchConfig(**{"rescue_s": 30.0, **config})  # type: ignore[arg-type]
        router = Router(RouterConfig(dead_after_s=1e9, local_prompt_tokens=2, move_s=0.001, page_move_s=0.0))
        self.gateway = Dispatcher(router, self.table, settings)
        self.workers: dict[str, SimWorker] = {}
        self.dead: list[SimWorker] = []
        self.asks: list[Ask] = []
        self.sent: list[tuple[str, ToWorker]] = []
        self._n_started = 0
        for w in weights:
            self.start(w)
        self.settle()

    def start(self, weights: tuple[float, float] = (1.0, 1.0)) -> SimWorker:
        worker_id = f"w{self._n_started}"
        self._n_started += 1
        self.gateway.expect(WorkerState(worker_id, worker_id, weights, self.now_s))
        self.workers[worker_id] = SimWorker(self, worker_id)
        return self.workers[worker_id]

    def ask(
        self, n_prompt: int, *, n: int = 1, max_tokens: int = 4, poison: bool = False, like: Ask | None = None
    ) -> Ask:
        """A request; ``like`` another one: with its prompt."""
        i = len(self.asks)
        prompt = [POISON if poison else i + 1] * n_prompt
        if like is not None:
            prompt = like.record.prompt_ids
        params = SamplingParams(seed=i + 1, n=n, max_tokens=max_tokens)
        record = SessionRecord(session_id=f"s{i}", prompt_ids=prompt, params=params)
        ask = Ask(record, Inbox())
        self._send(self.gateway.submit(record, ask.inbox, 0, self.now_s))
        self.asks.append(ask)
        return ask

    def cancel(self, ask: Ask) -> None:
        ask.cancelled = True
        branches = [branch_id(ask.record.session_id, k) for k in range(ask.record.params.n)]
        self._send(self.gateway.cancel(branches, self.now_s, abort_as=ask.record.session_id))

    def stop(self, ask: Ask, k: int) -> None:
        """End one sample that has spoken, as a stop string does."""
        ask.stopped.add(k)
        s = ask.record.session_id
        self._send(self.gateway.cancel([branch_id(s, k)], self.now_s, abort_as=None if k else f"{s}#0"))

    def kill(self, worker_id: str) -> None:
        self.dead.append(self.workers.pop(worker_id))
        self._send(self.gateway.lost(worker_id, PeerError("it died", code="worker_lost"), self.now_s))

    def retire(self, worker_id: str) -> None:
        self._send(self.gateway.retire(worker_id, self.now_s))

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self._send(self.gateway.tick(self.now_s))

    def hear(self, worker: SimWorker) -> None:
        """The gateway reads one message of a worker."""
        self._send(self.gateway.on_message(worker.id, worker.outbound.popleft(), self.now_s))

    def settle(self) -> None:
        """Messages until there are none; no steps."""
        while any(w.inbound or w.outbound for w in self.workers.values()):
            for w in list(self.workers.values()):
                while w.inbound:
                    w.take()
                while w.outbound:
                    self.hear(w)

    def finish(self, *, steps: int = 300) -> None:
        """Steps and messages until nothing is left to do."""
        for _ in range(steps):
            self.settle()
            if not len(self.gateway):
                return
            self.tick(0.2)
            for w in list(self.workers.values()):
                if w.id in self.workers:
                    w.step()
        raise AssertionError("sessions that never end")

    def check_over(self) -> None:
        """Every request ended once, with the right tokens or an error, and nobody keeps a page for nothing."""
        for ask in self.asks:
            p = ask.record.params
            got = ask.got()
            for k, tokens in got.items():
                assert tokens == [token_of(p.seed or 0, k, i) for i in range(len(tokens))]
            if not ask.cancelled and ask.inbox.error is None:
                assert ask.ended() | ask.stopped == set(range(p.n))
                assert all(len(got[k]) == p.max_tokens for k in ask.ended())
        assert len(self.table) == len(self.gateway) == len(self.gateway.moves) == 0
        for w in self.workers.values():
            assert w.pins == set() and w.fetched == {} and w.live == {}, w.id

    def _send(self, effects: list[tuple[str, ToWorker]]) -> None:
        self.sent += effects
        for worker_id, message in effects:
            if worker_id in self.workers:
                self.workers[worker_id].inbound.append(message)


def kinds(cluster: SimCluster, kind: type) -> list[tuple[str, Any]]:
    """The messages of a kind that the gateway has sent, and to whom."""
    return [(w, m) for w, m in cluster.sent if isinstance(m, kind)]


def _names(record: SessionRecord) -> list[bytes]:
    parent, names = root_hash(LAYOUT.model, record.salt), []
    for i in range(len(record.prompt_ids) // PAGE):
        parent = page_hash(parent, record.prompt_ids[i * PAGE : (i + 1) * PAGE])
        names.append(parent)
    return names


def happen(cluster: SimCluster, n: int) -> bool:
    """Let ``n`` single messages or steps happen; False when all is over before that."""
    for _ in range(n):
        for w in cluster.workers.values():
            if w.inbound:
                w.take()
                break
            if w.outbound:
                cluster.hear(w)
                break
        else:
            busy = [w for w in cluster.workers.values() if w.live]
            if not busy:
                return False
            busy[0].step()
    return True
