"""What the gateway knows of its workers: who they are, what they said last, how fast they are. Pure: time is an argument."""

from collections.abc import Iterable, Iterator

from kilat.base import metrics as names
from kilat.policy.route.loads import Loads
from kilat.policy.route.steps import StepTimes
from kilat.policy.route.views import WorkerView
from kilat.wire.messages import Hello, Status

SLOWNESS_WEIGHT = 0.1
"""Of the newest interval."""


class WorkerState:
    """One life of one worker. ``name`` stays when it is started again, ``worker_id`` does not.

    ``retiring``: it has been asked to give its sessions away and end. ``fatal``: its last words. The weights are its shares of the two kinds
    of work, and may be changed while it runs. ``times`` belongs to all workers: what one has not done yet is known from the others;
    ``slowness`` is how many times as long this one takes.
    """

    def __init__(self, worker_id: str, name: str, weights: tuple[float, float], now_s: float) -> None:
        self.worker_id = worker_id
        self.name = name
        self.prefill_weight, self.decode_weight = weights
        self.hello: Hello | None = None
        self.status: Status | None = None
        self.heard_at_s = now_s
        self.fatal: str | None = None
        self.retiring = False
        self.times = StepTimes()
        self.slowness = 1.0

    @property
    def takes_sessions(self) -> bool:
        """It is ready, and neither it nor anybody else wants it to end."""
        draining = self.status is not None and self.status.draining
        return self.hello is not None and not draining and not self.retiring

    @property
    def word(self) -> str:
        """Its state in one word."""
        return "starting" if self.hello is None else "ready" if self.takes_sessions else "draining"

    @property
    def step_age_s(self) -> float:
        return self.status.gauges.get(names.STEP_AGE, 0.0) if self.status is not None else 0.0

    def on_status(self, status: Status) -> None:
        """Keep it, and learn from what was done since the one before it."""
        before, self.status = self.status, status
        if before is None:
            return

        def grown(name: str) -> float:
            return status.counters.get(name, 0.0) - before.counters.get(name, 0.0)

        work = status.step - before.step, grown(names.PREFILL_TOKENS), grown(names.OUTPUT_TOKENS)
        seconds = grown(names.STEP_SECONDS)
        if work[0] > 0 and seconds > 0:
            self.times.measured(*work, seconds)
            expected_s = self.times.seconds(*work)
            if expected_s > 0:
                self.slowness += SLOWNESS_WEIGHT * (seconds / expected_s - self.slowness)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of computing prompts alone; 0 while not known."""
        return self.times.prompt_tokens_per_s / self.slowness

    def step_s(self, running: float) -> float:
        """A step that decodes so many sessions, at least one; 0 while not known."""
        return self.times.decode_s(max(running, 1)) * self.slowness

    def view(self, loads: Loads) -> WorkerView:
        """For the router. Pages come from its last status, load from what was given to it since."""
        load, hello = loads.of(self.worker_id), self.hello
        n_pages = hello.n_pages if hello is not None else 0
        gauges = self.status.gauges if self.status is not None else {}
        free = n_pages
        if names.PAGES_FREE in gauges:
            free = int(gauges[names.PAGES_FREE] + gauges.get(names.PAGES_CACHED, 0.0))
        return WorkerView(
            worker_id=self.worker_id,
            prefill_weight=self.prefill_weight,
            decode_weight=self.decode_weight,
            running=load.running,
            waiting=load.waiting,
            free_pages=free,
            n_pages=n_pages,
            queued_prompt_tokens=load.queued_prompt_tokens,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            step_s=self.step_s(load.running),
            row_s=self.times.row_s * self.slowness,
            draining=not self.takes_sessions,
            seen_s=self.heard_at_s,
            max_running=hello.max_num_seqs if hello is not None else 0,
        )


class Workers:
    """All workers that are expected or there, by id, oldest first."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerState] = {}
        self._gone_counters: dict[str, float] = {}
        self._complete = False
        self._times = StepTimes()

    def __iter__(self) -> Iterator[WorkerState]:
        return iter(self._workers.values())

    def get(self, worker_id: str) -> WorkerState | None:
        return self._workers.get(worker_id)

    def add(self, worker: WorkerState) -> None:
        self._workers[worker.worker_id] = worker
        worker.times = self._times

    def remove(self, worker_id: str) -> WorkerState | None:
        """It is gone. What it has counted stays in the totals."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None and worker.status is not None:
            for name, value in worker.status.counters.items():
                self._gone_counters[name] = self._gone_counters.get(name, 0.0) + value
        return worker

    def takes(self, worker_id: str | None) -> bool:
        """Whether this worker takes sessions."""
        worker = self._workers.get(worker_id) if worker_id is not None else None
        return worker is not None and worker.takes_sessions

    def can_move(self, owner: str, reader: str) -> bool:
        """Whether pages of ``owner`` can be used by ``reader``: another worker, the same layout, a way to read them."""
        a, b = self._workers.get(owner), self._workers.get(reader)
        if a is None or b is None or a is b or a.hello is None or b.hello is None:
            return False
        return a.hello.layout is not None and a.hello.layout == b.hello.layout and bool(a.hello.endpoints)

    def views(self, loads: Loads, *, without: Iterable[str] = ()) -> list[WorkerView]:
        """The workers that can be given sessions, for the router."""
        left_out = frozenset(without)
        return [w.view(loads) for w in self if w.takes_sessions and w.worker_id not in left_out]

    @property
    def ready(self) -> bool:
        """Whether a new session can be taken. At the beginning that needs workers for both kinds of work; later, when all of one kind
        are gone for a while, the others do it too."""
        takers = [w for w in self if w.takes_sessions]
        if not self._complete:
            kinds = [(w.prefill_weight > 0, w.decode_weight > 0) for w in takers]
            self._complete = any(p for p, _ in kinds) and any(d for _, d in kinds)
        return self._complete and bool(takers)

    def settle(self) -> None:
        """Nobody else is to be waited for at the beginning: a worker was given up."""
        self._complete = True

    @property
    def hello(self) -> Hello | None:
        """What the workers are, for all of them serve the same model; None while none is there."""
        return next((w.hello for w in self if w.hello is not None), None)

    def counters(self) -> dict[str, float]:
        """Sums over all workers that ever were."""
        total = dict(self._gone_counters)
        for worker in self:
            for name, value in (worker.status.counters if worker.status is not None else {}).items():
                total[name] = total.get(name, 0.0) + value
        return total

    def gauges(self) -> dict[str, float]:
        """Sums over the workers that are there; of ages the largest."""
        total: dict[str, float] = {}
        for worker in self:
            for name, value in (worker.status.gauges if worker.status is not None else {}).items():
                before = total.get(name, 0.0)
                total[name] = max(before, value) if name == names.STEP_AGE else before + value
        return total
