"""An engine without a model, for tests of everything around it: what it says is a function of the prompt, the seed and the sample.

Sessions move in and out as with the real one, but it has no pages: whoever adopts one of its sessions gets the record alone.

Prompts may hold commands (bytes of the byte-level tokenizer of ``tiny_model``):

    say:TEXT      answer TEXT (up to the next special token), then end
    crash!        raise in the step        exit!    die at once
    hang!         never end the step       error!   fail this session alone
    refuse!       LimitError at the door   bug!     ValueError at the door
"""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from types import SimpleNamespace

import msgspec
from msgspec.structs import replace
from tiny_model import EOS, IM_END

from kilat.base import metrics
from kilat.base.errors import CapacityError, ConfigError, EngineError, LimitError, NotFoundError
from kilat.base.hashing import branch_seed
from kilat.base.ids import branch_id
from kilat.policy.cache.changes import PageChanges
from kilat.policy.sched.moves import Arrived, Departed
from kilat.wire.messages import SessionEvent, TokenLogprob
from kilat.wire.session import SessionRecord

VOCAB = 259
PAGE = 16
WORDS = ["sun", "moon", "café", "river", "星", "wind", "naïve", "stone", "😀", "leaf"]


@dataclass(frozen=True)
class FakeSettings:
    """``start``: ok, bad (ConfigError), raise, exit (die at once). ``die_after_steps``: exit in that step, 0 for never."""

    step_s: float = 0.0
    max_model_len: int = 512
    max_num_seqs: int = 64
    max_waiting: int = 1024
    start: str = "ok"
    die_after_steps: int = 0


@dataclass
class _Branch:
    id: str
    record: SessionRecord
    script: list[int]
    limit: int
    cached: int
    seq: int = 0
    output: list[int] = field(default_factory=list)
    hand_over: bool = False


class FakeEngine:
    """Emits one token per running branch and step; the rest waits."""

    def __init__(self, settings: FakeSettings) -> None:
        if settings.start == "bad":
            raise ConfigError("the model's config says num_heads 0")
        if settings.start == "exit":
            os._exit(9)
        if settings.start == "raise":
            raise RuntimeError("no luck")
        self.settings = settings
        self.info = SimpleNamespace(
            model_id="fake",
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            vocab_size=VOCAB,
            page_tokens=PAGE,
            n_pages=64,
            eos_ids=(IM_END, EOS),
            kernels="fake: there is no model",
            ledger_bytes={"weights": 0},
        )
        self.step_count = 0
        self._live: dict[str, _Branch] = {}
        self._seen: set[tuple[str, tuple[int, ...]]] = set()
        self._held: dict[str, list[_Branch]] = {}
        self._frozen: dict[str, _Branch] = {}
        self._untold: list[str] = []
        self.pages = SimpleNamespace(layout=None, view=None, fd=None)
        self._n_aborted = 0

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._frozen)

    def submit(
        self, record: SessionRecord, arrived: Arrived | None = None, *, hand_over: bool = False
    ) -> None:
        text = _text(record.prompt_ids)
        if "refuse!" in text:
            raise LimitError("the prompt says refuse, limit 0", param="prompt")
        if "bug!" in text:
            raise ValueError("a bug in submit")
        if len(self._live) + record.params.n > self.settings.max_num_seqs + self.settings.max_waiting:
            raise CapacityError("the queue is full: try again later", retry_after_s=3.0)
        key = (record.salt, tuple(record.prompt_ids))
        cached = (len(record.prompt_ids) - 1) // PAGE * PAGE if key in self._seen else 0
        self._seen.add(key)
        room = self.settings.max_model_len - len(record.prompt_ids)
        limit = min(room, record.params.max_tokens or room)
        for k in range(record.n_sessions):
            branch = branch_id(record.session_id, k)
            output = list(record.output_ids) if k == 0 else []
            script = _script(record, record.branch or k, limit)
            made = _Branch(
                branch, record, script, limit, cached if k == 0 else 0, len(output), output, hand_over
            )
            if hand_over and k:
                self._held.setdefault(record.session_id, []).append(made)  # goes with sample 0
            else:
                self._live[branch] = made

    def abort(self, session_ids: Iterable[str]) -> list[SessionEvent]:
        events = []
        for given in session_ids:
            session_id = given.removesuffix("#0")
            ids = [session_id] if "#" in given else [session_id, *(f"{session_id}#{k}" for k in range(1, 16))]
            self._live.update((b.id, b) for b in self._held.pop(session_id, ()))
            for branch in ids:
                found = self._live.pop(branch, None) or self._frozen.pop(branch, None)
                if found is not None:
                    self._n_aborted += 1
                    events.append(SessionEvent(branch, found.record.epoch, found.seq, [], finish="abort"))
        return events

    def prepare(self):
        return False

    def step(self) -> list[SessionEvent]:
        self.step_count += 1
        if self.settings.step_s:
            time.sleep(self.settings.step_s)
        if self.step_count == self.settings.die_after_steps:
            os._exit(9)
        running = list(self._live.values())[: self.settings.max_num_seqs]
        events = [self._advance(branch) for branch in running]
        for b in running:
            if b.id not in self._live:
                self._live.update((other.id, other) for other in self._held.pop(b.id, ()))
            elif b.hand_over:
                self.freeze(b.id)
        return events

    def freeze(self, session_id: str) -> None:
        if session_id in self._frozen:
            return
        if session_id not in self._live:
            raise NotFoundError("no live session has this id")
        self._frozen[session_id] = self._live.pop(session_id)
        self._untold.append(session_id)

    def take_frozen(self) -> list[str]:
        told, self._untold = [i for i in self._untold if i in self._frozen], []
        return told

    def export(self, session_id: str) -> SessionRecord:
        b = self._frozen.get(session_id) or self._live.get(session_id)
        if b is None:
            raise NotFoundError("no live session has this id")
        return replace(
            b.record,
            session_id=b.id,
            branch=b.record.branch if b.id == b.record.session_id else int(b.id.rpartition("#")[2]),
            output_ids=list(b.output),
            with_samples=bool(self._held.get(session_id)),
        )

    def depart(self, session_id: str) -> Departed:
        record = self.export(session_id)
        self._frozen.pop(session_id, None)
        self._live.pop(session_id, None)
        self._held.pop(session_id, None)
        return Departed(record, [], 0)

    def computed(self, session_id: str) -> tuple[int, list[int]]:
        self.export(session_id)
        return 0, []

    def reserve(self, n_pages: int) -> list[int] | None:
        return None

    def pin(self, pages: Sequence[int]) -> None:
        assert not pages

    def unpin(self, pages: Sequence[int]) -> None:
        assert not pages

    def lend(self, names: Sequence[bytes]) -> list[int]:
        return []

    def seal_arrived(self, pages: Sequence[int], names: Sequence[bytes]) -> None:
        assert not pages

    def watch_pages(self) -> PageChanges:
        return PageChanges()

    def page_names(self) -> list[bytes]:
        return []

    def _advance(self, b: _Branch) -> SessionEvent:
        text = _text(b.record.prompt_ids)
        if "crash!" in text:
            raise RuntimeError("the step broke")
        if "exit!" in text and len(b.output) >= 3:
            os._exit(9)
        if "hang!" in text:
            time.sleep(3600)
        seq, b.seq = b.seq, b.seq + 1
        if "error!" in text:
            del self._live[b.id]
            return SessionEvent(
                b.id,
                b.record.epoch,
                seq,
                [],
                finish="error",
                error="non-finite logits",
                error_code=EngineError.code,
            )
        params = b.record.params
        token = b.script[len(b.output)]
        stops = set(params.stop_token_ids) if params.ignore_eos else {IM_END, EOS, *params.stop_token_ids}
        finish, stop_id, ids = None, None, [token]
        if token in stops and len(b.output) >= params.min_tokens:
            finish, stop_id, ids = "stop", token, []
        b.output += ids
        if finish is None and len(b.output) >= b.limit:
            finish = "length"
        if finish is not None:
            del self._live[b.id]
        first = seq == len(b.record.output_ids)
        return SessionEvent(
            b.id,
            b.record.epoch,
            seq,
            ids,
            finish=finish,
            stop_id=stop_id,
            logprobs=[logprob_of(t, params.logprobs) for t in ids] if params.logprobs is not None else None,
            prompt_logprobs=_prompt_logprobs(b) if first else None,
            cached_tokens=b.cached if first else 0,
        )

    def counters(self) -> dict[str, float]:
        return {metrics.FINISHED_ABORT: float(self._n_aborted)}

    def gauges(self) -> dict[str, float]:
        return {
            metrics.SESSIONS_RUNNING: float(min(len(self._live), self.settings.max_num_seqs)),
            metrics.SESSIONS_WAITING: float(max(0, len(self._live) - self.settings.max_num_seqs)),
        }

    def close(self) -> None:
        pass


def make_fake_engine(settings: bytes) -> FakeEngine:
    """The factory that a worker is given."""
    return FakeEngine(msgspec.json.decode(settings, type=FakeSettings))


def logprob_of(token: int, top: int | None) -> TokenLogprob:
    """A made-up logprob that depends on the token alone."""
    best = [((token + i) % 256, -0.5 - i) for i in range(top or 0)]
    return TokenLogprob(token, -0.5 - token / 1000, best)


def _prompt_logprobs(b: _Branch) -> list[TokenLogprob | None] | None:
    top = b.record.params.prompt_logprobs
    if top is None or "#" in b.id:
        return None
    return [None, *(logprob_of(t, top) for t in b.record.prompt_ids[1:])]


def _text(ids: Iterable[int]) -> str:
    return "".join(chr(i) if i < 256 else "\x00" for i in ids)


def _script(record: SessionRecord, k: int, limit: int) -> list[int]:
    """All tokens the branch would ever emit, at least ``limit`` of them."""
    text = _text(record.prompt_ids)
    at = text.rfind("say:")
    if at >= 0:
        said = text[at + 4 :].partition("\x00")[0]
        return [ord(c) for c in said] + [IM_END] * (limit + 1)
    seed = branch_seed(record.params.seed or 0, k) if record.params.temperature > 0 else 0
    out: list[int] = []
    while len(out) <= limit:
        digest = blake2b(f"{text}:{seed}:{len(out)}".encode(), digest_size=2).digest()
        out += f"{WORDS[digest[0] % len(WORDS)]} ".encode()
    return out
