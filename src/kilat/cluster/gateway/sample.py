"""One sample of a request, from the worker's events to text that may be sent. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from kilat.text.detokenize import StreamDetokenizer
from kilat.wire.messages import SessionEvent, TokenLogprob
from kilat.wire.sampling import SamplingParams


class Piece(NamedTuple):
    """News of one sample: text that is safe to send, the logprobs of new tokens, and ``finish`` when this was the last."""

    text: str
    logprobs: Sequence[TokenLogprob]
    finish: str | None

    def joined(self, later: "Piece") -> "Piece":
        """This piece and the one after it, as one."""
        return Piece(self.text + later.text, (*self.logprobs, *later.logprobs), later.finish or self.finish)


class Sample:
    """The text state of one sample. ``output_ids`` is the log of all tokens that were turned into text for the client.

    ``finish`` is None while it runs; ``stop_reason`` is then the stop string or the stop token id that the client asked for.
    ``hit_stop_string`` says that the text ended here while the worker may still be generating: stop it. A token's logprob is told with
    its text, so what a stop string cuts off has none.
    """

    __slots__ = (
        "_detokenizer",
        "_n_told",
        "_pending",
        "_stop_ids",
        "finish",
        "hit_stop_string",
        "output_ids",
        "stop_reason",
    )

    def __init__(self, detokenizer: StreamDetokenizer, params: SamplingParams) -> None:
        self._detokenizer = detokenizer
        self._stop_ids = frozenset(params.stop_token_ids)
        self._pending: list[TokenLogprob] = []
        self._n_told = 0
        self.output_ids: list[int] = []
        self.finish: str | None = None
        self.stop_reason: str | int | None = None
        self.hit_stop_string = False

    @property
    def text_offsets(self) -> Sequence[int]:
        """Where in this sample's text each output token begins, in characters."""
        return self._detokenizer.text_offsets

    def feed(self, event: SessionEvent) -> Piece:
        """Take one event. Events after the end give empty pieces."""
        if self.finish is not None:
            return Piece("", (), None)
        detokenizer = self._detokenizer
        text = detokenizer.push(event.token_ids) if event.token_ids else ""
        if event.finish is not None:
            text += detokenizer.finish()
        self.output_ids += event.token_ids
        if detokenizer.stopped is not None:
            del self.output_ids[detokenizer.n_tokens :]
            self.finish = "stop"
            self.stop_reason = detokenizer.stopped
            self.hit_stop_string = event.finish is None
        elif event.finish is not None:
            self.finish = event.finish
            if event.stop_id in self._stop_ids:
                self.stop_reason = event.stop_id
        return Piece(text, self._tell(event.logprobs) if event.logprobs or self._pending else (), self.finish)

    def _tell(self, logprobs: Sequence[TokenLogprob] | None) -> Sequence[TokenLogprob]:
        """The logprobs of tokens whose text has been sent by now and that were not told yet."""
        self._pending += logprobs or ()
        n_new = self._detokenizer.n_sent_tokens - self._n_told
        told, self._pending = self._pending[:n_new], self._pending[n_new:]
        self._n_told += len(told)
        return told
