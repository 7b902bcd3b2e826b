"""What a gateway and a worker say to each other. Frames are msgpack of one of the two unions at the end.

Gateway -> worker: Submit, Abort, Drain, Ping; about pages: Peers, Fetch, Adopt, Announce, Export, Lend, Release, Resync.
Worker -> gateway: Hello, StepEvents, Status, Refused, Fatal; about pages: Offered, Fetched, Recalled, PagesChanged.
Order is kept per connection. A session's events carry its epoch and a sequence number that grows by one per event.
"""

import msgspec

from kilat.wire import PROTOCOL_VERSION
from kilat.wire.kv import Endpoint, KvLayout, Offer
from kilat.wire.session import SessionRecord


class Submit(msgspec.Struct, frozen=True, tag="submit", forbid_unknown_fields=True):
    """Run a session. ``output_ids`` not empty means: adopt it and go on after its last token.

    The session's ``params.n`` samples come back as ``id``, ``id#1``, ... ; stop strings are the gateway's business. With
    ``hand_over`` it is only computed up to its first token, then offered. ``prefix``: pages of its prompt to be read from a peer first.
    """

    record: SessionRecord
    hand_over: bool = False
    prefix: Offer | None = None


class Abort(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True):
    """Stop these sessions. An id without ``#`` stops all its samples, ``id#0`` sample 0 alone. Unknown ids are ignored: abort is
    idempotent."""

    session_ids: list[str]


class Drain(msgspec.Struct, frozen=True, tag="drain", forbid_unknown_fields=True):
    """Take no new sessions, finish the running ones, then exit 0; after ``deadline_s`` seconds abort what is left."""

    deadline_s: float


class Ping(msgspec.Struct, frozen=True, tag="ping", forbid_unknown_fields=True):
    """Answered with a Status."""


class Peers(msgspec.Struct, frozen=True, tag="peers", forbid_unknown_fields=True):
    """Where pages of other workers are read, by worker id: all of them; a worker that is missing is gone, reads from it fail."""

    endpoints: dict[str, list[Endpoint]]


class Fetch(msgspec.Struct, frozen=True, tag="fetch", forbid_unknown_fields=True):
    """Read these pages of a session that will be adopted later. Answered with Fetched."""

    session_id: str
    offer: Offer


class Adopt(msgspec.Struct, frozen=True, tag="adopt", forbid_unknown_fields=True):
    """Read the last pages, then go on with the session. What cannot be read is computed; answered with Fetched. It runs to its end here unless it is
    exported."""

    record: SessionRecord
    offer: Offer | None = None


class Announce(msgspec.Struct, frozen=True, tag="announce", forbid_unknown_fields=True):
    """These sessions will be exported: offer the full pages that they have, and from now on those that they fill, while they go on. Each is
    answered with an Offered at once, perhaps without pages. Sessions that are not running here are not answered."""

    session_ids: list[str]


class Export(msgspec.Struct, frozen=True, tag="export", forbid_unknown_fields=True):
    """Stop these sessions after their committed tokens and offer them; each is answered with an Offered that holds its record.
    Sessions that ended meanwhile are not answered: their last event is on its way."""

    session_ids: list[str]


class Lend(msgspec.Struct, frozen=True, tag="lend", forbid_unknown_fields=True):
    """Pin the longest known start of this chain of page names; answered with an Offered of that ``move_id``, perhaps without pages."""

    move_id: str
    names: list[bytes]


class Release(msgspec.Struct, frozen=True, tag="release", forbid_unknown_fields=True):
    """These moves are over: unpin what was offered, or drop what was fetched for a session that will not come. Idempotent."""

    move_ids: list[str]


class Resync(msgspec.Struct, frozen=True, tag="resync", forbid_unknown_fields=True):
    """Say all page names that are held; answered with a whole PagesChanged."""


class Offered(msgspec.Struct, frozen=True, tag="offered", forbid_unknown_fields=True):
    """Pages of a session (or of a Lend, then ``session_id`` is its move id) may be read. ``record`` is set in a session's last offer:
    it has ended here, without a last event, and whoever adopts it goes on after ``record.output_ids``."""

    session_id: str
    offer: Offer
    record: SessionRecord | None = None


class Fetched(msgspec.Struct, frozen=True, tag="fetched", forbid_unknown_fields=True):
    """The pages of a move have been read, or ``why`` they have not; the offering side can unpin them."""

    session_id: str
    move_id: str
    ok: bool
    n_bytes: int = 0
    why: str = ""


class Recalled(msgspec.Struct, frozen=True, tag="recalled", forbid_unknown_fields=True):
    """The start of a session's prompt came back from this worker's own tiers: ``pages`` of each (``host``, ``disk``)."""

    session_id: str
    pages: dict[str, int]
    n_bytes: int


class PagesChanged(msgspec.Struct, frozen=True, tag="pages", forbid_unknown_fields=True):
    """Page names that can be found here from now on, and those that no longer can. ``seq`` grows by one per message of a worker's life;
    ``whole`` means that ``stored`` is everything."""

    seq: int
    stored: list[bytes]
    dropped: list[bytes]
    whole: bool = False


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """First message of a worker, when it is ready to serve.

    Sizes are in tokens unless named. ``kernels`` says which kernel set was chosen and why. ``ledger_bytes``: memory by owner.
    ``layout`` and ``endpoints`` are there when its pages can be read by peers, best transport first.
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
    layout: KvLayout | None = None
    endpoints: list[Endpoint] = []
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

    ``step`` is the step counter that ``/health/progress`` shows. ``busy`` is true while sessions are waiting or running. ``pages_seq`` is
    the number of the last PagesChanged, -1 before the first: so a lost one is noticed that no other follows.
    """

    step: int
    busy: bool
    draining: bool
    counters: dict[str, float]
    gauges: dict[str, float]
    pages_seq: int = -1


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


ToWorker = Submit | Abort | Drain | Ping | Peers | Fetch | Adopt | Announce | Export | Lend | Release | Resync
FromWorker = Hello | StepEvents | Status | Refused | Fatal | Offered | Fetched | Recalled | PagesChanged
