"""The state of a gateway: what all request handlers share."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.requests import Request
from starlette.types import Receive, Scope

from kilat import __version__
from kilat.base.errors import CapacityError, KilatError, NotFoundError, PeerError
from kilat.base.hashing import root_hash
from kilat.base.log import event, get_logger
from kilat.cluster.config import ServeConfig
from kilat.cluster.gateway.access import KeyRing, page_salt
from kilat.cluster.gateway.fleet import Fleet
from kilat.cluster.gateway.generation import Generation, Job
from kilat.cluster.gateway.http import ABORT
from kilat.cluster.gateway.metrics import GatewayMetrics
from kilat.cluster.gateway.prompt import PromptBuilder
from kilat.cluster.gateway.protocol import Common, CompletionRequest
from kilat.cluster.gateway.roles import Roles
from kilat.cluster.gateway.workers import WorkerState
from kilat.policy.scale.roles import RoleScaler
from kilat.wire.messages import Hello
from kilat.wire.sampling import SamplingParams

# keys in the ASGI scope
TENANT = "kilat.tenant"
ARRIVAL_S = "kilat.arrival_s"
SWEEP_S = 0.25

_log = get_logger("gateway")


# Takes a worker out of service (True: and starts a new one in its place); returns how many sessions were moved.
Drainer = Callable[[WorkerState, bool], Awaitable[int]]


class ClientGone(PeerError):
    """The client closed its connection; nobody is told."""

    status = 499
    code = "client_gone"


class Gateway:
    """One gateway process. Everything here belongs to the event loop's thread."""

    def __init__(self, config: ServeConfig, fleet: Fleet) -> None:
        self.config = config
        self.fleet = fleet
        self.keys = KeyRing(config.api_keys)
        self.draining = False
        self.prompts: PromptBuilder | None = None
        self.started_s = int(time.time())
        self._open: dict[Generation, Scope] = {}
        self.drainer: Drainer = _cannot_drain
        self.on_wish: Callable[[int], None] = lambda n: (
            None
        )  # hears now and then how many workers are wished for
        self.metrics = GatewayMetrics(fleet, lambda: len(self._open))
        self._clock = time.monotonic
        self.roles: Roles | None = None
        if (scale := config.scale) is not None:
            self.roles = Roles(RoleScaler(scale), fleet.dispatcher, self._clock())
            fleet.on_new = self.roles.routed

    def why_not_ready(self) -> CapacityError | None:
        """The error that a new request would get while this server cannot take any; None when it can."""
        if self.draining:
            return CapacityError(
                "the server is shutting down: try again soon or elsewhere", status=503, retry_after_s=5.0
            )
        if self.prompts is None or not self.fleet.ready:
            return CapacityError("the model is loading: try again soon", status=503, retry_after_s=2.0)
        return None

    @property
    def n_open(self) -> int:
        """Requests that are being generated for."""
        return len(self._open)

    def admit(self) -> tuple[Hello, PromptBuilder]:
        """Let a request for the model in. Raises CapacityError: 503 while there is no model, 429 when too many are open."""
        reason = self.why_not_ready()
        if reason is not None:
            raise reason
        hello, prompts = self.fleet.hello, self.prompts
        assert hello is not None and prompts is not None
        if len(self._open) >= self.config.max_requests:
            raise CapacityError(
                f"{len(self._open)} requests are open, limit {self.config.max_requests}: try again soon"
            )
        return hello, prompts

    def check_model(self, name: str | None) -> None:
        """Raise NotFoundError when a request names another model; no name means the one there is."""
        if name is not None and name != self.config.served_model_name:
            raise NotFoundError(
                f"the model {name[:128]!r} is not served here; there is {self.config.served_model_name!r}",
                param="model",
                code="model_not_found",
            )

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: changes when the same request may give another answer."""
        hello = self.fleet.hello
        seen = f"{__version__} {hello.model_id} {hello.kernels}" if hello is not None else __version__
        return "fp_" + root_hash(seen).hex()[:12]

    def start(
        self, request: Request, prompts: list[list[int]], params: SamplingParams, ask: Common, *, prefix: str
    ) -> Generation:
        """A generation for a request that was checked; :meth:`running` runs it. Its id begins with ``prefix``."""
        _, builder = self.admit()
        tenant = request.scope.get(TENANT, "")
        arrival_s = request.scope[ARRIVAL_S]
        job = Job(
            prompts=prompts,
            params=params,
            skip_special=ask.skip_special_tokens is not False,
            continues=isinstance(ask, CompletionRequest),
            tenant=tenant,
            salt=page_salt(tenant, ask.cache_salt),
            priority=-(ask.priority or 0),  # lower goes first on the wire of HTTP, as clients know it
            arrival_s=arrival_s,
            deadline_s=arrival_s + self.config.request_timeout_s,
        )
        lag = self.config.max_lag_tokens if ask.stream else None
        return Generation(
            self.fleet,
            builder.tokenizer,
            job,
            request_id=f"{prefix}-{secrets.token_hex(12)}",
            max_lag_tokens=lag,
        )

    @asynccontextmanager
    async def running(self, generation: Generation, scope: Scope, receive: Receive) -> AsyncIterator[None]:
        """Submit ``generation`` for the time of the block, watch its client, and clean up whatever happens."""
        self._open[generation] = scope
        watcher = asyncio.create_task(_watch_client(receive, generation))
        try:
            self.fleet.explanations.request(
                generation.request_id, generation.job.tenant, generation.session_ids
            )
            generation.submit()
            yield
        finally:
            watcher.cancel()
            del self._open[generation]
            generation.close()
            self._account(generation, scope)

    def _account(self, generation: Generation, scope: Scope) -> None:
        job, first, last = generation.job, generation.first_at_s, generation.last_at_s
        n_after_first = generation.output_tokens - len(generation.samples)
        total_s = self._clock() - job.arrival_s
        ttft_s = first - job.arrival_s if first is not None else None
        tpot_s = None
        if first is not None and last is not None and n_after_first > 0:
            tpot_s = (last - first) * len(generation.samples) / n_after_first
        if self.roles is not None:
            self.roles.over(generation)
        self.metrics.generated(total_s=total_s, ttft_s=ttft_s, tpot_s=tpot_s)
        event(
            _log,
            "request",
            id=generation.request_id,
            path=scope["path"],
            tenant=job.tenant or "-",
            prompt_tokens=generation.prompt_tokens,
            cached_tokens=generation.cached_tokens,
            output_tokens=generation.output_tokens,
            finish="/".join(sorted({s.finish or "-" for s in generation.samples})),
            error=generation.error_code or "-",
            ttft_ms=round(ttft_s * 1e3, 1) if ttft_s is not None else "-",
            total_ms=round(total_s * 1e3, 1),
        )

    async def sweep(self) -> None:
        """Runs for the life of the process: deadlines, signs of life on silent streams, readers that stopped reading, moves that hang."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = self._clock()
            self.fleet.tick()
            if self.roles is not None:
                self._move_shares(self.roles, now_s)
            for generation, scope in list(self._open.items()):
                self._sweep_one(generation, scope, now_s)

    def _move_shares(self, roles: Roles, now_s: float) -> None:
        for worker_id, (prefill, decode) in (roles.tick(self._open, now_s) or {}).items():
            event(_log, "roles", worker=worker_id, prefill_weight=prefill, decode_weight=decode)
        if roles.wished != self.metrics.workers_wished:
            event(_log, "workers_wished", workers=roles.wished)
        self.metrics.workers_wished = roles.wished
        self.on_wish(roles.wished)

    def _sweep_one(self, generation: Generation, scope: Scope, now_s: float) -> None:
        if generation.inbox.error is not None:
            if generation.failed_at_s is None:
                generation.failed_at_s = now_s
            elif now_s - generation.failed_at_s > self.config.max_lag_s and ABORT in scope:
                scope[ABORT]()
        elif now_s > generation.job.deadline_s:
            limit = self.config.request_timeout_s
            generation.fail(_late(f"the request took longer than {limit:g} s: ask for fewer tokens"))
        elif now_s - generation.heard_at_s > self.config.silence_s:
            generation.heard_at_s = now_s
            generation.inbox.nudge()

    def cut_all(self, error: KilatError) -> None:
        """End all open requests with ``error``."""
        for generation in self._open:
            generation.fail(error)

    def close(self) -> None:
        """Release the thread pool. The fleet is closed by its owner."""
        if self.prompts is not None:
            self.prompts.close()


async def _cannot_drain(worker: WorkerState, again: bool) -> int:
    raise CapacityError("workers are not drained here: whoever started them must do it", status=503)


def _late(message: str) -> KilatError:
    """The error of a request whose time is over: 504, and the same request may well succeed when the server is less busy."""
    error = PeerError(message, code="deadline_exceeded")
    error.status = 504
    return error


async def _watch_client(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.fail(ClientGone("the client closed its connection"))


def gateway_of(request: Request) -> Gateway:
    """The gateway that a request came to."""
    gateway: Gateway = request.app.state.gateway
    return gateway
