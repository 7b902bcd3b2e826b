"""An engine without a model: the real scheduler over pages that really hold bytes, and a runner that reads them back.

What it says after some tokens is a function of what it finds in the pages of those tokens, so pages that were moved wrongly give
other tokens. ``alone`` in tests/policy/sched/fakes.py is the oracle.
"""

import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace

import numpy as np

from kilat.base import metrics
from kilat.policy.cache.changes import PageChanges
from kilat.policy.sched.config import SchedulerConfig
from kilat.policy.sched.moves import Arrived, Departed
from kilat.policy.sched.plan import Row
from kilat.policy.sched.scheduler import Scheduler
from kilat.wire.kv import KvLayout
from kilat.wire.messages import SessionEvent
from kilat.wire.session import SessionRecord
from tests.policy.sched.fakes import EOS, VOCAB, FakeRunner

MODEL = "fake"
TOKEN_S = 0.001
"""What a token is said to take beside ``step_s``, whatever the machine does meanwhile."""


class Memory:
    """Pages of ``page_tokens`` 32-bit tokens in shared memory; -1 is a token that was never written."""

    def __init__(self, n_pages: int, page_tokens: int) -> None:
        page_bytes = 4 * page_tokens
        self.layout = KvLayout(1, page_tokens, 1, 1, "int32", page_bytes, MODEL)
        self.fd = os.memfd_create("pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, n_pages * page_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.view = np.frombuffer(mmap.mmap(self.fd, n_pages * page_bytes), np.uint8)
        self.view = self.view.reshape(n_pages, page_bytes)
        self.tokens = self.view.view(np.int32)
        self.tokens[:] = -1

    def save(self, page: int, into: np.ndarray) -> None:
        np.copyto(into, self.view[page])

    def load(self, page: int, fill: Callable[[np.ndarray], bool]) -> bool:
        return fill(self.view[page])

    def host_bytes(self, n_bytes: int) -> np.ndarray:
        return np.zeros(n_bytes, np.uint8)


class _Runner(FakeRunner):
    def __init__(self, memory: Memory) -> None:
        super().__init__(len(memory.view), memory.layout.page_tokens)
        self.kv = memory.tokens  # type: ignore[assignment]

    def context(self, row: Row) -> list[int]:
        tokens = [int(t) for t in super().context(row)]
        assert -1 not in tokens, "attends to a token that was never written"
        return tokens


class SchedEngine:
    """``step_s``: how long a step takes. ``token_s``: what a token of a prompt is said to cost. ``gate``, while it is not set, keeps steps from starting."""

    def __init__(self, *, step_s: float = 0.0, token_s: float | None = None, **config: object) -> None:
        defaults = {
            "n_pages": 64,
            "page_tokens": 4,
            "max_model_len": 128,
            "max_num_seqs": 8,
            "max_step_tokens": 16,
        }
        self.config = SchedulerConfig(**{**defaults, **config})  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.config, model_id=MODEL, eos_ids=[EOS])
        self.pages = Memory(self.config.n_pages, self.config.page_tokens)
        self.runner = _Runner(self.pages)
        self.step_count = 0
        self.step_s = step_s
        self._seconds = 0.0
        self.token_s = token_s
        self.gate = threading.Event()
        self.gate.set()
        self.info = SimpleNamespace(
            model_id=MODEL,
            max_model_len=self.config.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            vocab_size=VOCAB,
            page_tokens=self.config.page_tokens,
            n_pages=self.config.n_pages,
            eos_ids=(EOS,),
            kernels="fake",
            ledger_bytes={},
        )

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def prepare(self):
        return False

    def step(self) -> list[SessionEvent]:
        if not self.gate.is_set():
            return []
        time.sleep(self.step_s)
        plan = self.scheduler.plan(time.monotonic())
        if plan is None:
            return []
        self.step_count += 1
        events = self.scheduler.commit(plan, self.runner.run(plan), time.monotonic())
        self.scheduler.check()
        self._seconds += self.step_s + TOKEN_S * plan.n_tokens
        return events

    def submit(
        self, record: SessionRecord, arrived: Arrived | None = None, *, hand_over: bool = False
    ) -> None:
        self.scheduler.submit(record, time.monotonic(), arrived, hand_over=hand_over)
        self.scheduler.check()

    def abort(self, session_ids: Iterable[str]) -> list[SessionEvent]:
        return self.scheduler.abort(session_ids, time.monotonic())

    def freeze(self, session_id: str) -> None:
        self.scheduler.freeze(session_id)

    def take_frozen(self) -> list[str]:
        return self.scheduler.take_frozen()

    def export(self, session_id: str) -> SessionRecord:
        return self.scheduler.export(session_id)

    def depart(self, session_id: str) -> Departed:
        return self.scheduler.depart(session_id)

    def computed(self, session_id: str) -> tuple[int, list[int]]:
        return self.scheduler.computed(session_id)

    def reserve(self, n_pages: int) -> list[int] | None:
        return self.scheduler.reserve(n_pages)

    def pin(self, pages: Sequence[int]) -> None:
        self.scheduler.pin(pages)

    def unpin(self, pages: Sequence[int]) -> None:
        self.scheduler.unpin(pages)
        self.scheduler.check()

    def lend(self, names: Sequence[bytes]) -> list[int]:
        return self.scheduler.lend(names)

    def seal_arrived(self, pages: Sequence[int], names: Sequence[bytes]) -> None:
        self.scheduler.seal_arrived(pages, names)

    def watch_pages(self) -> PageChanges:
        return self.scheduler.watch_pages()

    def page_names(self) -> list[bytes]:
        return self.scheduler.page_names()

    def n_known(self, names: Sequence[bytes]) -> int:
        return self.scheduler.n_known(names)

    def watch_evictions(self, hear: Callable[[bytes, int], None]) -> None:
        self.scheduler.watch_evictions(hear)

    @property
    def prefill_token_s(self) -> float | None:
        return self.token_s

    def counters(self) -> dict[str, float]:
        return {**self.scheduler.counters(), metrics.STEP_SECONDS: self._seconds}

    def gauges(self) -> dict[str, float]:
        return self.scheduler.gauges()

    def close(self) -> None:
        os.close(self.pages.fd)
