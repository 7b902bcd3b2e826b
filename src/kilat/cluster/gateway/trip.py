"""One sample of a request on its way through workers: what the dispatcher keeps about it."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from msgspec.structs import replace

from kilat.cluster.gateway.sessions import Slot
from kilat.wire.session import SessionRecord


class Stage(Enum):
    PARKED = "parked"  # nobody has it
    LENDING = "lending"  # its worker is chosen, and waits for pages that a peer lends
    GIVEN = "given"  # a worker has it


@dataclass(slots=True, eq=False)
class Trip:
    """``record`` is what it began with, ``slot`` has its tokens and epoch. ``family``: all samples of its request, sample 0 first.

    ``held``: has not started, and goes wherever sample 0 goes. ``at`` is the worker that has it (or will, once pages are lent), ``target``
    the one that will go on after the first token (None: no hand-over). ``lend``: id of the lend that is waited for. ``fetch_end``: tokens
    whose pages the target has been told to fetch, ``fetched`` the moves of these that are over. ``leaving``: it goes to its target as soon as
    its pages are there, for its worker is to end.
    ``refused_until_s``: workers that could not take it, and when they may be asked again. ``n_deaths``: workers that died with it one after
    another, none of which got it a token further than ``mark``.
    """

    slot: Slot
    record: SessionRecord
    family: "list[Trip]"
    held: bool = False
    stage: Stage = Stage.PARKED
    at: str | None = None
    target: str | None = None
    lend: str | None = None
    fetch_end: int = 0
    fetched: list[str] = field(default_factory=list)
    leaving: bool = False
    n_tries: int = 0
    n_deaths: int = 0
    mark: int = 0
    refused_until_s: dict[str, float] = field(default_factory=dict)
    names: list[bytes] = field(default_factory=list)
    until_s: float = 0.0
    over: bool = False

    @property
    def id(self) -> str:
        return self.slot.branch

    @property
    def n_tokens(self) -> int:
        return len(self.record.prompt_ids) + len(self.slot.tokens)

    @property
    def ends_with_next(self) -> bool:
        """Whether each sample ends with its next token, whatever that is."""
        limit = self.record.params.max_tokens
        return limit is not None and len(self.slot.tokens) + 1 >= limit

    @property
    def party(self) -> "list[Trip]":
        """This sample and those that go with it."""
        if self.record.branch > 0 or self.record.params.n == 1:
            return [self]
        return [self, *(t for t in self.family if t.held and not t.over)]

    @property
    def portable(self) -> SessionRecord:
        """Its record as far as tokens have been let through."""
        tokens = list(self.slot.tokens)
        return replace(
            self.record,
            output_ids=tokens,
            epoch=self.slot.epoch,
            with_samples=bool(tokens) and len(self.party) > 1,
        )

    def given(self, worker_id: str, target: str | None) -> None:
        """To this worker, with all that go with it."""
        for t in self.party:
            t.stage, t.at, t.target = Stage.GIVEN, worker_id, target
            t.fetch_end, t.fetched, t.lend, t.leaving = 0, [], None, False


@dataclass(slots=True)
class Leaving:
    """Sessions that leave one worker: those that wait, and those that move, with their epochs there. ``asked``: those of which the worker
    has not said yet what pages they have."""

    waiting: deque[Trip]
    moving: dict[Trip, int] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    exported: bool = True
    until_s: float = 0.0
