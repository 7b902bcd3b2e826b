"""Roles: measures what requests get, and moves the workers' shares of prefill and decode towards the targets. Pure: time is an argument.

What is decided is policy/scale's; here it is fed, once per window, and its weights are given to the workers. Sessions stay where they are.
"""

from collections.abc import Iterable
from typing import Protocol

from kilat.cluster.gateway.dispatch import Dispatcher
from kilat.policy.route.views import WorkerView
from kilat.policy.scale.roles import RoleScaler, Weights
from kilat.policy.scale.window import RoleWorker, Window

WINDOW_S = 1.0


def role_worker(v: WorkerView, page_tokens: int) -> RoleWorker:
    """What the scaler is told of a worker. Prompts that wait will take pages too."""
    return RoleWorker(
        v.worker_id,
        v.prefill_weight,
        v.decode_weight,
        queued_prompt_tokens=v.queued_prompt_tokens,
        prefill_tokens_per_s=v.prefill_tokens_per_s,
        running=v.running,
        max_running=v.max_running,
        draining=v.draining,
        step_s=v.step_s,
        row_s=v.row_s,
        pages_used=v.n_pages - v.free_pages - (-v.queued_prompt_tokens // page_tokens),
        n_pages=v.n_pages,
    )


class Measured(Protocol):
    """What is needed of a ``Generation``. Times are seconds of one clock."""

    @property
    def arrival_s(self) -> float: ...
    @property
    def first_at_s(self) -> float | None: ...
    @property
    def last_at_s(self) -> float | None: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def n_samples(self) -> int: ...


class Roles:
    """Call :meth:`routed` for each new request, :meth:`over` when one ends, and :meth:`tick` often."""

    def __init__(self, scaler: RoleScaler, dispatcher: Dispatcher, now_s: float) -> None:
        self._scaler = scaler
        self._dispatcher = dispatcher
        self._began_s = now_s
        self._prompts: list[int] = []
        self._ttft_s: list[float] = []
        self._tpot_s: list[float] = []
        self._seen: dict[Measured, int] = {}

    @property
    def wished(self) -> int:
        """How many workers would keep the targets; 0 before the first window."""
        return self._scaler.wished

    def routed(self, n_tokens: int) -> None:
        """A new request has so many prompt tokens that must be computed."""
        self._prompts.append(n_tokens)

    def over(self, one: Measured) -> None:
        """A request has ended; measures it a last time."""
        self._measure(one)
        self._seen.pop(one, None)

    def tick(self, running: Iterable[Measured], now_s: float) -> Weights | None:
        """At the end of a window: the weights that were changed, by worker id."""
        seconds = now_s - self._began_s
        if seconds < WINDOW_S:
            return None
        for one in running:
            self._measure(one)
        hello = self._dispatcher.workers.hello
        page_tokens = hello.page_tokens if hello is not None else 1
        workers = [role_worker(v, page_tokens) for v in self._dispatcher.views()]
        window = Window(workers, seconds, self._prompts, self._ttft_s, self._tpot_s)
        self._began_s, self._prompts, self._ttft_s, self._tpot_s = now_s, [], [], []
        changed = self._scaler.on_window(window, now_s)
        for worker_id, (prefill, decode) in (changed or {}).items():
            worker = self._dispatcher.workers.get(worker_id)
            if worker is not None:
                worker.prefill_weight, worker.decode_weight = prefill, decode
        return changed

    def _measure(self, one: Measured) -> None:
        """Its first token, if it came in this window, and the time between those of this window."""
        if one.first_at_s is None or one.last_at_s is None:
            return
        n = one.output_tokens
        before = self._seen.get(one)
        if before is None:
            self._ttft_s.append(one.first_at_s - one.arrival_s)
            before = min(one.n_samples, n)  # the first of each sample has nothing before it
        self._seen[one] = n
        span_s = one.last_at_s - max(self._began_s, one.first_at_s)
        if n > before and span_s > 0:
            self._tpot_s.append(span_s * one.n_samples / (n - before))
