"""Settings of a served deployment: one gateway and one worker on one machine."""

import msgspec

from kilat.base.errors import ConfigError
from kilat.text.tokenizer import Files

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_HEADER_BYTES = 64 * 1024


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of ``kilat serve``. Immutable.

    files                the model's files (``kilat.load.sources.ModelFiles``)
    engine               settings of the engine: any dataclass or struct; the worker's engine factory reads its JSON
    served_model_name    the name that clients use
    api_keys             clients must present one of these; a key ``kl_<name>_<secret>`` belongs to tenant ``<name>``
    port                 0 takes a free port, which is printed
    drain_s              after SIGTERM running answers get this long to end
    request_timeout_s    a request that takes longer is stopped with an error
    max_requests         requests that may be open at once before new ones get 429
    max_lag_tokens       tokens that may wait for a reader that does not keep up before its stream is cut
    max_lag_s            how long a cut stream may keep its socket when its reader takes nothing
    silence_s            a stream that has nothing to say for this long sends its headers, then a comment
    status_interval_s    how often the worker says how it is
    worker_timeout_s     a worker that says nothing for this long is killed and replaced
    step_timeout_s       a worker whose step takes this long is killed and replaced
    max_failures         the server gives up after this many deaths of the worker within ``failure_window_s``
    backoff_s            pause before the first restart; doubles with each death in the window, at most 10 s
    stop_at_stdin_end    drain when standard input closes, for a parent that may die without a word
    """

    files: Files
    engine: object
    served_model_name: str
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
    stop_at_stdin_end: bool = False


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
    positive = (
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
    for name, value in (("drain_s", config.drain_s), ("backoff_s", config.backoff_s)):
        if not value >= 0:
            raise ConfigError(f"{name} is {value:g}, it must be 0 or more")
