"""The portable record of a running request: everything that moves a request moves this."""

import msgspec

from kilat.wire.sampling import SamplingParams

SESSION_VERSION = 1


class SessionRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a running request is. Every other state (stop, penalties, grammar, detokenizer) is a function of it.

    ``prompt_ids`` and ``output_ids`` are token ids; sample ``branch`` of ``params.n``. ``sampling.seed`` is always set. ``epoch`` grows
    each time the session changes hands. ``arrival_s`` is the gateway's clock and only orders waiting sessions of one worker.
    ``page_hashes`` name the full KV pages of ``prompt_ids + output_ids``, oldest first; the receiver uses those it holds and
    recomputes the rest. ``with_samples``: sample 0 has output, and the other samples of its request have not started; they go with it.
    Without output they always do.
    """

    session_id: str
    prompt_ids: list[int]
    params: SamplingParams
    output_ids: list[int] = []
    branch: int = 0
    epoch: int = 0
    tenant: str = ""
    salt: str = ""
    priority: int = 0
    arrival_s: float = 0.0
    page_hashes: list[bytes] = []
    with_samples: bool = False
    version: int = SESSION_VERSION

    @property
    def is_under_way(self) -> bool:
        """Whether a worker has taken it before."""
        return self.epoch > 0 or bool(self.output_ids)

    @property
    def n_sessions(self) -> int:
        """Sessions that submitting this record starts: all samples of the request, or this one alone."""
        alone = self.branch > 0 or (bool(self.output_ids) and not self.with_samples)
        return 1 if alone else self.params.n
