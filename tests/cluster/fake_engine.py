"""An engine without a model, for tests of everything around it: what it says is a function of the prompt, the seed and the sample.

Prompts may hold commands (bytes of the byte-level tokenizer of ``tiny_model``):

    say:TEXT      answer TEXT (up to the next special token), then end
    crash!        raise in the step        exit!    die at once
    hang!         never end the step       error!   fail this session alone
    refuse!       LimitError at the door   bug!     ValueError at the door
"""

import os
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from types import SimpleNamespace

import msgspec
from tiny_model import EOS, IM_END

from kilat.base import metrics
from kilat.base.errors import CapacityError, ConfigError, EngineError, LimitError
from kilat.base.hashing import branch_seed
from kilat.base.ids import branch_id
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
        self._doomed: deque[str] = deque()
        self._n_aborted = 0

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def submit(self, record: SessionRecord) -> None:
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
        for k in range(record.params.n):
            branch = branch_id(record.session_id, k)
            self._live[branch] = _Branch(
                branch, record, _script(record, k, limit), limit, cached if k == 0 else 0
            )

    def abort(self, session_ids: Iterable[str]) -> list[SessionEvent]:
        events = []
        for given in session_ids:
            session_id = given.removesuffix("#0")
            ids = [session_id] if "#" in given else [session_id, *(f"{session_id}#{k}" for k in range(1, 16))]
            for branch in ids:
                found = self._live.pop(branch, None)
                if found is not None:
                    self._n_aborted += 1
                    events.append(SessionEvent(branch, found.record.epoch, found.seq, [], finish="abort"))
        return events

    def step(self) -> list[SessionEvent]:
        self.step_count += 1
        if self.settings.step_s:
            time.sleep(self.settings.step_s)
        if self.step_count == self.settings.die_after_steps:
            os._exit(9)
        running = list(self._live.values())[: self.settings.max_num_seqs]
        return [self._advance(branch) for branch in running]

    def _advance(self, b: _Branch) -> SessionEvent:
        text = _text(b.record.prompt_ids)
        if "crash!" in text:
            raise RuntimeError("the step broke")
        if "exit!" in text and len(b.output) == 3:
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
        first = seq == 0
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
