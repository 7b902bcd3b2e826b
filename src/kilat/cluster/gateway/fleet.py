"""Fleet: the workers of this gateway and the sessions that they have. Joins the dispatcher, which decides, to the links, which send.

Everything here runs on the event loop's thread.
"""

import time
from collections.abc import Callable

from kilat.base.errors import KilatError
from kilat.base.ids import branch_id
from kilat.base.log import event, get_logger
from kilat.cluster.gateway.dispatch import Dispatcher
from kilat.cluster.gateway.explain import Explanations
from kilat.cluster.gateway.link import WorkerLinks
from kilat.cluster.gateway.placing import Chooser, DispatchConfig, Effects
from kilat.cluster.gateway.sessions import Inbox, SessionTable
from kilat.cluster.gateway.trip import Trip
from kilat.cluster.gateway.workers import WorkerState
from kilat.policy.route.views import Route
from kilat.wire import PROTOCOL_VERSION
from kilat.wire.messages import Drain, Fatal, FromWorker, Hello, Recalled
from kilat.wire.session import SessionRecord

_log = get_logger("fleet")


class Fleet:
    """``on_ready`` is called whenever a worker becomes ready, ``on_new`` with the prompt tokens to compute of each new session."""

    def __init__(
        self,
        links: WorkerLinks,
        chooser: Chooser,
        config: DispatchConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.links = links
        self.table = SessionTable()
        self.dispatcher = Dispatcher(chooser, self.table, config)
        self.workers = self.dispatcher.workers
        self.explanations = Explanations()
        self.on_ready: Callable[[Hello], None] = lambda hello: None
        self.on_new: Callable[[int], None] = lambda n_tokens: None
        self._clock = clock
        links.on_message = self._on_message
        self.dispatcher.on_route = self._on_route
        self.dispatcher.on_begun = self.explanations.begun

    # -- requests -------------------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """A new session would be taken."""
        return self.workers.ready

    @property
    def hello(self) -> Hello | None:
        """What the workers are; None while none is there."""
        return self.workers.hello

    def submit(self, record: SessionRecord, inbox: Inbox, first_index: int) -> None:
        """Run a request; events of sample ``k`` go to ``inbox`` as sample ``first_index + k``. Raises CapacityError."""
        self._send(self.dispatcher.submit(record, inbox, first_index, self._clock()))

    def stop_sample(self, session_id: str, k: int, n: int) -> None:
        """Stop sample ``k`` of ``n`` and forget it. Never raises, for a worker that is gone runs nothing."""
        # The id alone would stop all samples.
        name = f"{session_id}#0" if k == 0 and n > 1 else None
        self._send(self.dispatcher.cancel([branch_id(session_id, k)], self._clock(), abort_as=name))

    def release(self, session_ids: list[str], n: int) -> None:
        """Forget these sessions and stop what still runs of their ``n`` samples. Idempotent; never raises."""
        for s in session_ids:
            branches = [branch_id(s, k) for k in range(n)]
            self._send(self.dispatcher.cancel(branches, self._clock(), abort_as=s))

    # -- workers --------------------------------------------------------------------------------------------------------------------

    def expect(self, worker_id: str, name: str, weights: tuple[float, float]) -> WorkerState:
        """A worker is being started: from now on it is listened to."""
        worker = WorkerState(worker_id, name, weights, self._clock())
        self.links.expect(worker_id)
        self.dispatcher.expect(worker)
        return worker

    def lost(self, worker_id: str, error: KilatError) -> None:
        """A worker is gone: its sessions go on elsewhere, or end with ``error``. Idempotent."""
        self.links.forget(worker_id)
        self._send(self.dispatcher.lost(worker_id, error, self._clock()))

    def named(self, name: str) -> WorkerState | None:
        """The worker of this name, or with this id."""
        return next((w for w in self.workers if name in (w.name, w.worker_id)), None)

    def retire(self, worker: WorkerState) -> None:
        """Move its sessions to other workers. Raises CapacityError."""
        self._send(self.dispatcher.retire(worker.worker_id, self._clock()))

    def ask_to_end(self, worker: WorkerState, drain_s: float) -> None:
        """Let a worker finish what it has, then end."""
        if worker.hello is not None:
            self.links.send(worker.worker_id, Drain(drain_s))

    def tick(self) -> None:
        """Called every now and then."""
        self._send(self.dispatcher.tick(self._clock()))

    def close(self, error: KilatError) -> None:
        """Sessions that still wait end with ``error``; the links are closed."""
        self.table.fail_all(error)
        self.links.close()

    def silent_s(self, worker: WorkerState) -> float:
        """How long a worker has said nothing."""
        return self._clock() - worker.heard_at_s

    def _send(self, effects: Effects) -> None:
        for worker_id, message in effects:
            self.links.send(worker_id, message)

    def _on_message(self, worker_id: str, message: FromWorker) -> None:
        if isinstance(message, Hello) and message.protocol != PROTOCOL_VERSION:
            message = Fatal(f"the worker speaks protocol {message.protocol}, this gateway {PROTOCOL_VERSION}")
        if isinstance(message, Fatal):
            event(_log, "worker_fatal", worker=worker_id, reason=repr(message.message))
        if isinstance(message, Recalled):
            worker = self.workers.get(worker_id)
            self.explanations.recalled(message, worker.name if worker is not None else worker_id)
        self._send(self.dispatcher.on_message(worker_id, message, self._clock()))
        if isinstance(message, Hello):
            self.on_ready(message)

    def _on_route(self, trip: Trip, route: Route) -> None:
        if trip.n_tries == 0:
            self.on_new(route.why.get("tokens_left", trip.n_tokens))
        self.explanations.routed(trip, route, {w.worker_id: w.name for w in self.workers})
