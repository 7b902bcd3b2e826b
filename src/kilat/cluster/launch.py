"""``serve``: one gateway in this process, its workers beside it, until SIGTERM or until no worker can be kept alive."""

import asyncio
import errno
import json
import logging
import os
import resource
import secrets
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn
import uvloop

from kilat.base.env import cuda_devices
from kilat.base.errors import CapacityError, ConfigError, KilatError, PeerError
from kilat.base.log import event, get_logger
from kilat.cluster.config import ServeConfig, check, places
from kilat.cluster.gateway.app import build_app
from kilat.cluster.gateway.fleet import Fleet
from kilat.cluster.gateway.http import Connection
from kilat.cluster.gateway.link import WorkerLinks
from kilat.cluster.gateway.placing import DispatchConfig
from kilat.cluster.gateway.prompt import PromptBuilder
from kilat.cluster.gateway.serving import Gateway
from kilat.cluster.launchers.launcher import Launcher
from kilat.cluster.launchers.local import LocalLauncher
from kilat.cluster.launchers.ray_launcher import RayLauncher
from kilat.cluster.supervise import Crew, Plant
from kilat.policy.route.config import RouterConfig
from kilat.policy.route.router import Router
from kilat.text.template import ChatTemplate, load_template
from kilat.text.tokenizer import Tokenizer
from kilat.wire.messages import Hello

WORKER_COMMAND = (sys.executable, "-m", "kilat.cluster.worker")
EXIT_FAILED = 1
KEEP_ALIVE_S = 30
LAST_WORDS_S = 2.0
MAX_OPEN_FILES = 65536
SOCKET_PATH_LIMIT = 100

_log = get_logger("serve")


def serve(config: ServeConfig, *, worker_command: Sequence[str] = WORKER_COMMAND) -> int:
    """Serve until asked to stop; returns the exit code of the deployment: 0 after a drain, 1 when the workers died for good.

    ``worker_command``, Python and its arguments, is started with the path of its configuration added. Raises ConfigError for settings
    that are unsafe, a port that is taken, or a model whose tokenizer cannot be read.
    """
    check(config)
    with _listen(config) as listener, _runtime_folder() as folder:
        return uvloop.run(_Deployment(config, worker_command, folder, listener).run())


@contextmanager
def _runtime_folder() -> Iterator[Path]:
    """A folder with mode 0700 for the socket and the worker's configuration; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="kilat-") as name:
        if len(name) > SOCKET_PATH_LIMIT - len("/gateway"):
            raise ConfigError(
                f"the path of the folder for temporary files has {len(name)} characters: set TMPDIR to a shorter one"
            )
        yield Path(name)


@contextmanager
def _listen(config: ServeConfig) -> Iterator[socket.socket]:
    """A bound socket. It is opened before anything is loaded, so that a taken port shows at once."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as e:
        listener.close()
        fix = "--port" if e.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port} ({e.strerror}): choose another {fix}"
        ) from e
    with listener:
        yield listener


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: a signal starts a drain here."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Deployment:
    """The parts of one served model and the order of their lives."""

    def __init__(
        self, config: ServeConfig, command: Sequence[str], folder: Path, listener: socket.socket
    ) -> None:
        secret = secrets.token_hex(32)
        host, port = listener.getsockname()[:2]
        self._config = config
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._listener = listener
        crew_places = places(config, []) if config.ray else places(config, _cores(), cuda_devices())
        scale = config.scale
        router = Router(
            RouterConfig(
                dead_after_s=config.worker_timeout_s,
                target_step_s=scale.target_step_s if scale is not None else None,
            )
        )
        address = f"tcp://{config.ray.control_host}:*" if config.ray else f"ipc://{folder}/gateway"
        self._fleet = Fleet(WorkerLinks(address, secret), router, DispatchConfig(rescue_s=config.rescue_s))
        self._fleet.on_ready = self._announce
        self._gateway = Gateway(config, self._fleet)
        transports = config.transports if len(crew_places) > 1 else ()
        self._launcher: Launcher = (
            RayLauncher(config, command[1:], crew_places) if config.ray else LocalLauncher(command, folder)
        )
        self._crew = Crew(Plant(config, self._fleet, self._launcher, secret, transports), crew_places)
        self._gateway.drainer = self._crew.drain
        self._gateway.on_wish = self._crew.wish
        self._server = _Server(_uvicorn_config(self._gateway))
        self._began_s = time.monotonic()
        self._stop = asyncio.Event()
        self._announced = False
        self._hurry = False

    async def run(self) -> int:
        """The whole life; returns the exit code."""
        loop = asyncio.get_running_loop()
        _raise_open_files()
        self._fleet.links.open()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        if self._config.stop_at_stdin_end:
            loop.add_reader(sys.stdin.fileno(), self._on_stdin)
        supervision = asyncio.create_task(self._crew.run(self._on_restart))
        await asyncio.sleep(0)  # the workers start first, for they load longest
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        others = [asyncio.create_task(self._gateway.sweep()), asyncio.create_task(self._stop.wait())]
        try:
            await self._load_text()
            await asyncio.wait((supervision, serving, others[1]), return_when=asyncio.FIRST_COMPLETED)
            await self._drain(0.0 if supervision.done() else self._config.drain_s)
        finally:
            self._gateway.draining = True
            await self._crew.stop(0.0)
            self._server.should_exit = True
            await asyncio.wait((supervision, serving))
            for task in others:
                task.cancel()
            await self._launcher.close()
            self._fleet.close(PeerError("the server stopped; send the request again"))
            self._gateway.close()
        return self._exit_code(supervision, serving)

    @staticmethod
    def _exit_code(supervision: "asyncio.Task[None]", serving: "asyncio.Task[None]") -> int:
        serving.result()  # raises what broke the HTTP server
        error = supervision.exception()
        if error is None:
            return 0
        if not isinstance(error, KilatError):
            raise error
        _log.error("giving up: %s", error)
        return EXIT_FAILED

    async def _load_text(self) -> None:
        """Tokenizer and template, in a thread: meanwhile the server answers 503."""
        tokenizer, template = await asyncio.get_running_loop().run_in_executor(None, self._read_text)
        self._gateway.prompts = PromptBuilder(tokenizer, template)
        self._announce()

    def _read_text(self) -> tuple[Tokenizer, ChatTemplate | None]:
        tokenizer = Tokenizer.from_files(self._config.files)
        return tokenizer, load_template(self._config.files, tokenizer)

    async def _drain(self, drain_s: float) -> None:
        """Take no new requests, let the open ones end for ``drain_s``, then cut them."""
        gateway = self._gateway
        gateway.draining = True
        event(_log, "draining", open_requests=gateway.n_open, deadline_s=drain_s)
        await self._until_idle(drain_s)
        gateway.cut_all(
            CapacityError("the server is shutting down; send the request again elsewhere", status=503)
        )
        self._hurry = False
        await self._until_idle(LAST_WORDS_S)

    async def _until_idle(self, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while self._gateway.n_open and time.monotonic() < deadline_s and not self._hurry:
            await asyncio.sleep(0.02)

    def _on_signal(self) -> None:
        self._hurry = self._stop.is_set()  # the second signal is impatience
        self._stop.set()

    def _on_stdin(self) -> None:
        fd = sys.stdin.fileno()
        if not os.read(fd, 4096):
            asyncio.get_running_loop().remove_reader(fd)
            self._stop.set()

    def _on_restart(self) -> None:
        self._gateway.metrics.worker_restarts += 1

    def _announce(self, hello: Hello | None = None) -> None:
        """Tell once, on standard output, that requests are served now."""
        if self._announced or self._gateway.why_not_ready() is not None:
            return
        self._announced = True
        name, took_s = self._config.served_model_name, time.monotonic() - self._began_s
        print(f"ready: {name} at {self._url}/v1 ({took_s:.1f} s)", flush=True)
        print(f"try:   {self._example()}", flush=True)

    def _example(self) -> str:
        ask: dict[str, object] = {"model": self._config.served_model_name, "max_tokens": 64, "temperature": 0}
        if self._gateway.prompts is not None and self._gateway.prompts.template is not None:
            path = "/v1/chat/completions"
            ask |= {
                "stream": True,
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
            }
        else:
            path = "/v1/completions"
            ask |= {"stream": True, "prompt": "The capital of France is"}
        key = " -H 'Authorization: Bearer KEY'" if self._config.api_keys else ""
        return f"curl -N {self._url}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(ask))}"


def _cores() -> list[int]:
    """The cores that this process may use, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _raise_open_files() -> None:
    """As many open files as the system allows: each stream is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _uvicorn_config(gateway: Gateway) -> uvicorn.Config:
    # It reports bugs in requests a second time, without their context; what is worth reading is in our own log.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    return uvicorn.Config(
        build_app(gateway),
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=3,
        backlog=2048,
    )
