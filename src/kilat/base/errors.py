"""The one error tree of kilat.

    KilatError
    ├── RequestError            the client sent something that cannot be served         400, not retryable
    │   ├── LimitError          a number or size in the request is over a limit         400
    │   ├── NotFoundError       no such model, route or session                         404
    │   └── AuthError           no key, or a wrong key                                  401
    ├── CapacityError           the server is full or draining, try later               429/503, retryable
    ├── ConfigError             an option or a model's config.json is wrong             start-up
    ├── ModelFileError          weights or tokenizer files are damaged or hostile       start-up
    ├── SourceError             a model could not be downloaded or found                start-up
    ├── PeerError               another process died or answered nonsense               502/503, retryable
    └── EngineError             the engine itself failed; a bug or the machine          500

A message says four things where they apply: what is wrong, what was got, what the limit is, how to fix it:
``prompt has 9,210 tokens, limit 8,192: shorten it or start with a larger --max-model-len``. Messages reach clients, so they name
nothing internal (no paths of the server, no addresses).
"""


class KilatError(Exception):
    """Root of all errors that kilat raises on purpose.

    ``status`` is the HTTP status a gateway answers with, ``retryable`` whether the same request may succeed later,
    ``code`` a stable machine-readable word, ``param`` the request field at fault (or None).
    """

    status = 500
    retryable = False
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class RequestError(KilatError):
    """The request cannot be served as it is; sending it again changes nothing."""

    status = 400
    code = "invalid_request"


class LimitError(RequestError):
    """A count or size in the request is over a limit of this server."""

    code = "limit_exceeded"


class NotFoundError(RequestError):
    """The named model, route or session does not exist."""

    status = 404
    code = "not_found"


class AuthError(RequestError):
    """No API key, or one that is not known."""

    status = 401
    code = "invalid_api_key"


class CapacityError(KilatError):
    """The server is full, starting or draining. ``retry_after_s`` goes into the Retry-After header."""

    status = 429
    retryable = True
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, status: int = 429) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.status = status


class ConfigError(KilatError):
    """An option, or a field of a model's config, is missing, unknown or contradictory."""

    code = "bad_config"


class ModelFileError(KilatError):
    """A model file is truncated, corrupt, hostile, or does not fit its config."""

    code = "bad_model_file"


class SourceError(KilatError):
    """A model could not be found or downloaded, or its checksum is wrong."""

    code = "model_source"


class PeerError(KilatError):
    """Another process of this deployment died, timed out or broke the protocol."""

    status = 503
    retryable = True
    code = "peer_failed"


class EngineError(KilatError):
    """The engine failed while it served a request that was in order."""

    code = "engine_failed"
