"""Settings of a served deployment: one gateway and its workers on one machine."""

import re
from collections.abc import Sequence

import msgspec

from kilat.base.errors import ConfigError
from kilat.policy.scale.config import ScaleConfig
from kilat.text.tokenizer import Files

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_HEADER_BYTES = 64 * 1024
MAX_WORKERS = 256


class RayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers are actors of a Ray cluster. Immutable.

    address       of the cluster, HOST:PORT; ``auto`` is the one that runs on this host, or else a new one of this host alone
    cpus, gpus    what a worker takes of its host
    control_host  address of this host that workers of others reach the gateway at; with loopback they must be on this host
    """

    address: str = "auto"
    cpus: float = 1.0
    gpus: float = 0.0
    control_host: str = "127.0.0.1"


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of ``kilat serve``. Immutable.

    files                the model's files (``kilat.load.sources.ModelFiles``)
    engine               settings of the engine: any dataclass or struct; the worker's engine factory reads its JSON
    served_model_name    the name that clients use
    workers              workers that compute prompts and go on with them; each has an equal part of the cores
    prefill, decode      workers that mainly compute prompts, and that mainly go on with them
    ttft_slo_s, tpot_slo_s  targets, both or none: workers' shares of the two kinds of work follow the traffic to keep them
    max_workers          with targets: so many workers there may be while the traffic needs more than the ones above, which are the least;
                         each of those that are added does both kinds of work. 0: their number stays
    grow_after_s, shrink_after_s  how long more, or fewer, must be needed before workers are started, or one is ended
    transports           how workers read each other's pages, best first; those that do not fit where the pages lie are left out
    host_cache_gb        memory of the host (10^9 bytes) for pages that left the pools of CUDA devices; the workers share it evenly
    disk_cache_gb        the same on a disk, for any device, below ``disk_cache_dir``; it survives restarts
    api_keys             clients must present one of these; a key ``kl_<name>_<secret>`` belongs to tenant ``<name>``
    ray                  where workers run, if not as processes of this host
    port                 0 takes a free port, which is printed
    drain_s              after SIGTERM running answers get this long to end
    request_timeout_s    a request that takes longer is stopped with an error
    max_requests         requests that may be open at once before new ones get 429
    max_lag_tokens       tokens that may wait for a reader that does not keep up before its stream is cut
    max_lag_s            how long a cut stream may keep its socket when its reader takes nothing
    silence_s            a stream that has nothing to say for this long sends its headers, then a comment
    status_interval_s    how often a worker says how it is
    worker_timeout_s     a worker that says nothing for this long is killed and replaced
    step_timeout_s       a worker whose step takes this long is killed and replaced
    max_failures         a worker is given up after this many deaths within ``failure_window_s``; the server, with its last worker
    backoff_s            pause before the first restart; doubles with each death in the window, at most 10 s
    rescue_s             how long a request whose worker died may wait for another one, or for its worker to be back
    stop_at_stdin_end    drain when standard input closes, for a parent that may die without a word
    """

    files: Files
    engine: object
    served_model_name: str
    workers: int = 1
    prefill: int = 0
    decode: int = 0
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    max_workers: int = 0
    grow_after_s: float = 5.0
    shrink_after_s: float = 60.0
    transports: tuple[str, ...] = ("shm", "cuda_ipc", "tcp")
    host_cache_gb: float = 0.0
    disk_cache_gb: float = 0.0
    disk_cache_dir: str = ""
    ray: RayConfig | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    drain_s: float = 30.0
    request_timeout_s: float = 1800.0
    max_requests: int = 1024
    max_lag_tokens: int = 4096
    max_lag_s: float = 5.0
    silence_s: float = 15.0
    status_interval_s: float = 0.5
    worker_timeout_s: float = 30.0
    step_timeout_s: float = 300.0
    max_failures: int = 5
    failure_window_s: float = 300.0
    backoff_s: float = 0.5
    rescue_s: float = 30.0
    stop_at_stdin_end: bool = False

    @property
    def n_workers(self) -> int:
        """Workers that there are at the beginning, and at least."""
        return self.workers + self.prefill + self.decode

    @property
    def scale(self) -> ScaleConfig | None:
        """How shares and the number of workers follow the targets; None without targets. Raises ConfigError."""
        if self.ttft_slo_s is None or self.tpot_slo_s is None:
            return None
        if not self.max_workers:
            return ScaleConfig(self.ttft_slo_s, self.tpot_slo_s)
        return ScaleConfig(
            self.ttft_slo_s,
            self.tpot_slo_s,
            least_workers=self.n_workers,
            most_workers=self.max_workers,
            fewer_after=max(round(self.shrink_after_s), 1),  # windows, which last a second
            grow_after_s=self.grow_after_s,
            shrink_after_s=self.shrink_after_s,
        )


class Place(msgspec.Struct, frozen=True):
    """One worker of a deployment, whichever process is it: its name, its shares of the two kinds of work, its cores (empty: all),
    and CUDA devices by name, its own first: pages of the others may be read (empty: as it finds them)."""

    name: str
    prefill_weight: float
    decode_weight: float
    cores: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()


def places(config: ServeConfig, cores: Sequence[int], devices: Sequence[str] = ()) -> list[Place]:
    """The workers of a deployment on these cores and devices: those of the beginning, then those that may be added. A lone one has them all;
    several share the cores as evenly as it goes, each in a row, and two have the same core only when there are fewer cores than workers.
    They take the devices in turn."""
    kinds = [(f"worker-{i}", 1.0, 1.0) for i in range(config.workers)]
    kinds += [(f"prefill-{i}", 1.0, 0.0) for i in range(config.prefill)]
    kinds += [(f"decode-{i}", 0.0, 1.0) for i in range(config.decode)]
    n_added = max(config.max_workers - config.n_workers, 0)
    kinds += [(f"worker-{config.workers + i}", 1.0, 1.0) for i in range(n_added)]
    n, n_cores = len(kinds), len(cores)
    out = []
    for i, (name, prefill, decode) in enumerate(kinds):
        first, end = i * n_cores // n, (i + 1) * n_cores // n
        own = tuple(cores[first : max(end, first + 1)]) if n > 1 else ()
        at = i % len(devices) if devices else 0
        out.append(Place(name, prefill, decode, own, (*devices[at:], *devices[:at]) if n > 1 else ()))
    return out


def check(config: ServeConfig) -> None:
    """Raise ConfigError for settings that are unsafe or out of range."""
    if not 0 <= config.port <= 65535:
        raise ConfigError(f"port is {config.port}, allowed 0 to 65535")
    if config.host not in LOOPBACK and not config.api_keys:
        raise ConfigError(
            f"host {config.host} can be reached from other machines and no API key is set: "
            "add --api-key, or keep the default --host 127.0.0.1"
        )
    for key in config.api_keys:
        if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError("an API key must have 8 or more printable ASCII characters and no space")
    if len(set(config.api_keys)) != len(config.api_keys):
        raise ConfigError("an API key is given twice")
    if not config.served_model_name:
        raise ConfigError("the served model name is empty")
    _check_workers(config)
    if config.ray is not None:
        _check_ray(config.ray)
    if config.disk_cache_gb and not config.disk_cache_dir:
        raise ConfigError("disk_cache_gb is set and disk_cache_dir is not: name a folder for the pages")
    positive = (
        ("ttft_slo_s", 1.0 if config.ttft_slo_s is None else config.ttft_slo_s),
        ("tpot_slo_s", 1.0 if config.tpot_slo_s is None else config.tpot_slo_s),
        ("request_timeout_s", config.request_timeout_s),
        ("max_requests", config.max_requests),
        ("max_lag_tokens", config.max_lag_tokens),
        ("max_lag_s", config.max_lag_s),
        ("silence_s", config.silence_s),
        ("status_interval_s", config.status_interval_s),
        ("worker_timeout_s", config.worker_timeout_s),
        ("step_timeout_s", config.step_timeout_s),
        ("max_failures", config.max_failures),
        ("failure_window_s", config.failure_window_s),
    )
    for name, value in positive:
        if not value > 0:
            raise ConfigError(f"{name} is {value:g}, it must be above 0")
    for name, value in (
        ("host_cache_gb", config.host_cache_gb),
        ("disk_cache_gb", config.disk_cache_gb),
        ("drain_s", config.drain_s),
        ("backoff_s", config.backoff_s),
        ("rescue_s", config.rescue_s),
        ("grow_after_s", config.grow_after_s),
        ("shrink_after_s", config.shrink_after_s),
    ):
        if not value >= 0:
            raise ConfigError(f"{name} is {value:g}, it must be 0 or more")


def _check_workers(config: ServeConfig) -> None:
    for name, n in (("workers", config.workers), ("prefill", config.prefill), ("decode", config.decode)):
        if not 0 <= n <= MAX_WORKERS:
            raise ConfigError(f"{name} is {n}, allowed 0 to {MAX_WORKERS}")
    if not config.workers and not (config.prefill and config.decode):
        raise ConfigError(
            f"{config.prefill} prefill and {config.decode} decode workers: at least one of each is needed, "
            "or --workers that do both"
        )
    if (config.ttft_slo_s is None) != (config.tpot_slo_s is None):
        raise ConfigError(
            "a target is given for one of ttft and tpot only: shares are weighed by both, so give both"
        )
    if config.max_workers and (config.ttft_slo_s is None or config.tpot_slo_s is None):
        raise ConfigError(
            "max_workers is set without targets of ttft and tpot, which say when more are needed"
        )
    if config.max_workers and not config.n_workers <= config.max_workers <= MAX_WORKERS:
        raise ConfigError(
            f"max_workers is {config.max_workers}, allowed {config.n_workers} (the workers of the beginning) to {MAX_WORKERS}"
        )


def _check_ray(ray: RayConfig) -> None:
    if ray.address != "auto" and not re.fullmatch(r"[^:/\s]+:\d{1,5}", ray.address):
        raise ConfigError(f"the address of Ray is {ray.address!r}: give HOST:PORT, or auto")
    for name, value in (("cpus", ray.cpus), ("gpus", ray.gpus)):
        if not 0 <= value <= 4096:
            raise ConfigError(f"{name} of a worker is {value:g}, allowed 0 to 4096")
    if not ray.cpus and not ray.gpus:
        raise ConfigError(
            "a worker takes no CPU and no GPU of its host: Ray would put any number of them there"
        )
    if ":" in ray.control_host or ray.control_host in ("", "*", "0.0.0.0"):  # noqa: S104  (refused here)
        raise ConfigError(
            f"the control host is {ray.control_host!r}: it must be one IPv4 address or name of this host, "
            "for workers connect to it"
        )
