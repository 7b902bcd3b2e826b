"""What a gateway and a worker say to each other. Frames are msgpack of one of the two unions at the end.

Gateway -> worker: Submit, Abort, Drain, Ping. Worker -> gateway: Hello, StepEvents, Status, Refused, Fatal.
Order is kept per connection. A session's events carry its epoch and a sequence number that grows by one per event.
"""

import msgspec

from kilat.wire import PROTOCOL_VERSION
from kilat.wire.session import SessionRecord


class Submit(msgspec.Struct, frozen=True, tag="submit", forbid_unknown_fields=True):
    """Run a session. ``output_ids`` not empty means: adopt it and go on after its last token.

    The session's ``params.n`` samples come back as ``id``, ``id#1``, ... ; stop strings are the gateway's business.
    """

    record: SessionRecord


class Abort(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True):
    """Stop these sessions. An id without ``#`` stops all its samples, ``id#0`` sample 0 alone. Unknown ids are ignored: abort is
    idempotent."""

    session_ids: list[str]


class Drain(msgspec.Struct, frozen=True, tag="drain", forbid_unknown_fields=True):
    """Take no new sessions, finish the running ones, then exit 0; after ``deadline_s`` seconds abort what is left."""

    deadline_s: float


class Ping(msgspec.Struct, frozen=True, tag="ping", forbid_unknown_fields=True):
    """Answered with a Status."""


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """First message of a worker, when it is ready to serve.

    Sizes are in tokens unless named. ``kernels`` says which kernel set was chosen and why. ``ledger_bytes``: memory by owner.
    """

    worker_id: str
    model_id: str
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    page_tokens: int
    n_pages: int
    eos_ids: list[int]
    kernels: str
    ledger_bytes: dict[str, int] = {}
    protocol: int = PROTOCOL_VERSION


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """Log-probability (natural log) of one token, and the likeliest alternatives as (token id, logprob), best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class SessionEvent(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """News of one session from one step.

    ``token_ids`` are new output tokens (usually one). ``finish`` is None while it runs, else ``stop``, ``length``, ``abort`` or
    ``error`` (then ``error`` says why and ``error_code`` is a code of ``base.errors``). ``stop_id`` is the token id that stopped it,
    which is not part of ``token_ids``. ``prompt_logprobs`` comes once, with the first event;
    its first entry is None, because nothing precedes the first token. ``cached_tokens``: prompt tokens taken from the prefix cache.
    """

    session_id: str
    epoch: int
    seq: int
    token_ids: list[int]
    finish: str | None = None
    stop_id: int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    error: str | None = None
    error_code: str | None = None


class StepEvents(msgspec.Struct, frozen=True, tag="events", forbid_unknown_fields=True):
    """All news of one step in one frame."""

    step: int
    events: list[SessionEvent]


class Status(msgspec.Struct, frozen=True, tag="status", forbid_unknown_fields=True):
    """A worker's health and counters, sent every ``status_interval`` and on Ping. Counters only grow; gauges are of now.

    ``step`` is the step counter that ``/health/progress`` shows. ``busy`` is true while sessions are waiting or running.
    """

    step: int
    busy: bool
    draining: bool
    counters: dict[str, float]
    gauges: dict[str, float]


class Refused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """A Submit was not taken. ``status`` is the HTTP status to answer with, ``retry_after_s`` when trying again may help."""

    session_id: str
    message: str
    code: str
    status: int
    retryable: bool
    param: str | None = None
    retry_after_s: float = 1.0


class Fatal(msgspec.Struct, frozen=True, tag="fatal", forbid_unknown_fields=True):
    """The worker is about to exit with this reason."""

    message: str


ToWorker = Submit | Abort | Drain | Ping
FromWorker = Hello | StepEvents | Status | Refused | Fatal
