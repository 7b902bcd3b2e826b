"""Every way in which a session or its prompt's pages go from one worker to another, with real engines around a tiny model: the ids are those
of one plain engine, greedy and seeded, for one sample and four, free and under a JSON schema."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from worker_pair import Start, Worker, adopt, check_clean, hand_over, introduce

from kilat.base.ids import branch_id
from kilat.wire.messages import (
    Announce,
    Export,
    Fetch,
    Fetched,
    Lend,
    Offered,
    PagesChanged,
    Release,
    Resync,
    StepEvents,
    Submit,
)
from kilat.wire.sampling import Grammar
from kilat.wire.session import SessionRecord
from tests.engine.harness import make_engine, record, run, tiny_model

pytestmark = pytest.mark.cpu

PROMPT = [(7 * k) % 251 for k in range(90)]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.95},
}
SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 8}},'
    ' "required": ["a"], "additionalProperties": false}'
)
SHAPES: dict[str, dict[str, Any]] = {
    "free": {"max_tokens": 40, "ignore_eos": True},
    "schema": {"max_tokens": 40, "grammar": Grammar("json_schema", SCHEMA)},
}
SETTINGS: dict[str, Any] = {"n_pages": 160, "grammar": True}

Alone = Callable[[SessionRecord], dict[str, list[int]]]
"""What one plain engine says, by sample."""
Way = Callable[[Worker, Worker, SessionRecord, Alone], None]


def samples(r: SessionRecord) -> list[str]:
    return [branch_id(r.session_id, k) for k in range(r.params.n)]


def through_hand_over(a: Worker, b: Worker, r: SessionRecord, alone: Alone) -> None:
    _, fetched = hand_over(a, b, r)
    assert all(f.ok for f in fetched)
    assert len(a.tokens(r.session_id)) == 1


def behind_a_prefix_of_the_other(a: Worker, b: Worker, r: SessionRecord, alone: Alone) -> None:
    a.tell(Resync(), Submit(record("first", r.prompt_ids, max_tokens=1)))
    a.wait_end("first")
    names = [name for m in a.all(PagesChanged) for name in m.stored]
    a.tell(Lend("lent", names))
    b.tell(Submit(r, prefix=a.wait(Offered).offer))
    assert b.wait(Fetched).ok
    a.tell(Release(["lent"]))
    b.wait_end(r.session_id)
    first = next(e for m in b.all(StepEvents) for e in m.events if e.session_id == r.session_id)
    assert first.cached_tokens == len(PROMPT) // 8 * 8


def through_a_drain(a: Worker, b: Worker, r: SessionRecord, alone: Alone) -> None:
    """All samples in the middle of their answers, as a gateway does it: what is full goes ahead."""
    ids = samples(r)
    a.tell(Submit(r))
    for sample in ids:
        a.until(lambda sample=sample: len(a.tokens(sample)) >= 3)  # type: ignore[misc]
    a.tell(Announce(ids))
    a.tell(Export(ids))
    n_moves, left = 0, set(ids)
    while left:
        offered = a.wait(Offered)
        n_moves += bool(offered.offer.pages) or offered.record is not None
        if offered.record is not None:
            left.remove(offered.session_id)
            adopt(b, offered)
        elif offered.offer.pages:
            b.tell(Fetch(offered.session_id, offered.offer))
    fetched = [b.wait(Fetched) for _ in range(n_moves)]
    assert all(f.ok for f in fetched)
    a.tell(Release([o.offer.move_id for o in a.all(Offered)]))
    assert all(a.tokens(s) for s in ids)


def across_a_change_of_roles(a: Worker, b: Worker, r: SessionRecord, alone: Alone) -> None:
    """The worker that decodes prefills for the other one while its own session goes on."""
    through_hand_over(a, b, r, alone)
    other = replace(r, session_id="other", prompt_ids=[*PROMPT[:40], 3, 1, 4])
    _, fetched = hand_over(b, a, other)
    assert all(f.ok for f in fetched)
    assert len(b.tokens("other")) == 1
    want = alone(other)
    for sample in samples(other):
        a.wait_end(sample)
        assert b.tokens(sample) + a.tokens(sample) == want[sample]


WAYS: dict[str, Way] = {
    "hand_over": through_hand_over,
    "prefix": behind_a_prefix_of_the_other,
    "drain": through_a_drain,
    "roles": across_a_change_of_roles,
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("way", WAYS)
def test_ids_are_those_of_one_plain_engine(
    start_worker: Start, model: Any, way: str, sampling: str, n: int, shape: str
) -> None:
    a, b = (
        start_worker(name, "shm", engine=make_engine(model, shared=True, **SETTINGS)) for name in ("a", "b")
    )
    introduce(a, b)
    r = record("s", PROMPT, n=n, **SAMPLING[sampling], **SHAPES[shape])

    def alone(one: SessionRecord) -> dict[str, list[int]]:
        return run(make_engine(model, **SETTINGS), [one])

    WAYS[way](a, b, r, alone)
    want = alone(r)
    assert len(want) == n
    for sample in samples(r):
        b.wait_end(sample)
        assert a.tokens(sample) + b.tokens(sample) == want[sample]
    check_clean(a, b)
