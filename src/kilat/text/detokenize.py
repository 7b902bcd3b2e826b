"""Token ids to text while they arrive: whole characters only, and nothing that may still turn out to be a stop string."""

import codecs
from bisect import bisect_left
from collections.abc import Sequence

from kilat.text.stops import StopMatcher
from kilat.text.tokenizer import Tokenizer


class StreamDetokenizer:
    """The text of one sample. What :meth:`push` and :meth:`finish` return, put together, depends on the ids and not on how they
    were split into pushes; without a stop string it is ``tokenizer.decode`` of all ids.

    The stop string that is complete first ends the text: it is cut before it, or after it with ``include_stop``. One that is
    complete within the first ``min_tokens`` ids is let pass. ``continues``: the ids go on after a text (see Tokenizer.decode).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
        continues: bool = False,
    ) -> None:
        self.stopped: str | None = None
        self._table = tokenizer.bytes_table
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._strip = tokenizer.strip_space and not continues
        self._matcher = StopMatcher(stop) if any(stop) else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._held = ""
        self._n_decoded = 0
        self._n_sent = 0
        self._finished = False
        self._starts: list[int] = []

    @property
    def n_tokens(self) -> int:
        """How many of the pushed ids count: all, or those up to and with the one that completed the stop string."""
        return len(self._starts)

    @property
    def n_sent_tokens(self) -> int:
        """How many leading ids the text returned so far has reached; after the end: those that belong to the text. Ids without
        characters of their own follow the id after them."""
        return len(self._starts) if self._finished else bisect_left(self._starts, self._n_sent)

    @property
    def text_offsets(self) -> Sequence[int]:
        """For each of the ``n_tokens`` ids, where its text begins, in characters. Owned by this object, grows with every push."""
        return self._starts

    def push(self, ids: Sequence[int]) -> str:
        """New text that is safe to send after ``ids``; empty once a stop string was found."""
        table, skip, size = self._table, self._skip, len(self._table)
        parts = []
        for i in ids:
            if self.stopped is not None:
                break
            self._starts.append(self._n_decoded)
            text = self._decode(b"" if i in skip or i >= size else table[i])
            if text:
                parts.append(self._take(text))
        return "".join(parts) if len(parts) != 1 else parts[0]

    def finish(self) -> str:
        """The rest that was held back: an unfinished character as U+FFFD, and what did not become a stop string."""
        if self.stopped is not None:
            return ""
        text = self._take(self._decode(b"", True))
        self._finished = self.stopped is None
        rest, self._held = self._held, ""
        self._n_sent += len(rest)
        return text + rest

    def _take(self, text: str) -> str:
        """``text`` was decoded: what can be sent of it and of what was held before."""
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        self._n_decoded += len(text)
        if self._matcher is None:
            self._n_sent += len(text)
            return text
        found = self._matcher.feed(text, armed=len(self._starts) > self._min_tokens)
        if found is not None:
            return self._cut(text, *found)
        window = self._held + text
        cut = len(window) - self._matcher.pending
        self._held = window[cut:]
        self._n_sent += cut
        return window[:cut]

    def _cut(self, text: str, end: int, stop: str) -> str:
        self.stopped = stop
        window = self._held + text[:end]
        kept = window if self._include_stop else window[: len(window) - len(stop)]
        self._held = ""
        self._n_sent += len(kept)
        return kept
