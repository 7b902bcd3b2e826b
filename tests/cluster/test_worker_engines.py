"""Sessions and prefixes between two worker loops with real engines around a tiny model: each runner, each way, what moves, and tiers.

Every way with every kind of request: test_same_tokens.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiered import Tiered
from worker_pair import Start, Worker, adopt, check_clean, hand_over, introduce

from kilat.base.ids import branch_id
from kilat.wire.messages import (
    Export,
    Fetched,
    Lend,
    Offered,
    PagesChanged,
    Recalled,
    Release,
    Resync,
    StepEvents,
    Submit,
)
from kilat.wire.session import SessionRecord
from tests.engine.harness import make_engine, record, run, tiny_model

pytestmark = pytest.mark.cpu

PROMPT = [(7 * k) % 251 for k in range(150)]
SAMPLING = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.9, "top_p": 0.95}}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture
def pair(start_worker: Start, model: Any) -> Callable[..., tuple[Worker, Worker]]:
    def make(transport: str, **settings: Any) -> tuple[Worker, Worker]:
        a, b = (
            start_worker(name, transport, engine=make_engine(model, shared=True, n_pages=128, **settings))
            for name in "ab"
        )
        introduce(a, b)
        return a, b

    return make


def check_same(model: Any, r: SessionRecord, a: Worker, b: Worker, **settings: Any) -> None:
    want = run(make_engine(model, n_pages=128, **settings), [r])
    for k in range(r.params.n):
        sample = branch_id(r.session_id, k)
        b.wait_end(sample)
        assert a.tokens(sample) + b.tokens(sample) == want[sample]
    assert len(want) == r.params.n


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_hand_over_of_samples_moves_each_page_of_the_prompt_once(
    pair: Any, model: Any, transport: str
) -> None:
    a, b = pair(transport)
    r = record("s", PROMPT, n=4, max_tokens=12, ignore_eos=True, **SAMPLING["seeded"])
    offers, fetched = hand_over(a, b, r)
    check_same(model, r, a, b)
    assert all(f.ok for f in fetched)
    n_pages = -(-len(PROMPT) // 8)
    assert sum(f.n_bytes for f in fetched) == n_pages * a.engine.pages.layout.page_bytes
    assert len(offers) > 1
    check_clean(a, b)


@pytest.mark.parametrize("runner", ["host", "device"])
def test_running_session_that_is_moved_says_the_same(pair: Any, model: Any, runner: str) -> None:
    a, b = pair("shm", depth=2, runner=runner)
    r = record("s", PROMPT, n=2, max_tokens=200, ignore_eos=True, **SAMPLING["seeded"])
    a.tell(Submit(r))
    a.until(lambda: len(a.tokens("s#1")) >= 3)
    a.tell(Export(["s", "s#1"]))
    for _ in range(2):
        adopt(b, a.wait(Offered))
    a.tell(Release([b.wait(Fetched).move_id for _ in range(2)]))
    check_same(model, r, a, b, depth=2, runner=runner)
    assert all(f.ok for f in b.all(Fetched))
    assert b.tokens("s")
    check_clean(a, b)


def test_prefix_of_a_peer_gives_the_same_tokens(pair: Any, model: Any) -> None:
    a, b = pair("tcp")
    a.tell(Resync(), Submit(record("first", PROMPT, max_tokens=1)))
    a.wait_end("first")
    names = [name for m in a.all(PagesChanged) for name in m.stored]
    a.tell(Lend("m1", names))
    r = record("s", PROMPT, n=4, max_tokens=12, ignore_eos=True, **SAMPLING["seeded"])
    b.tell(Submit(r, prefix=a.wait(Offered).offer))
    assert b.wait(Fetched).ok
    a.tell(Release(["m1"]))
    check_same(model, r, a, b)
    first = next(e for m in b.all(StepEvents) for e in m.events if e.session_id == "s")
    assert first.cached_tokens == len(PROMPT) // 8 * 8
    check_clean(a, b)


@pytest.mark.parametrize("runner", ["host", "device"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_prefix_that_was_on_disk_gives_the_same_tokens(
    tmp_path: Path, model: Any, runner: str, sampling: str
) -> None:
    engine = make_engine(model, shared=True, n_pages=32, depth=2, runner=runner)
    w = Tiered(tmp_path, engine=engine)
    try:
        r = record("s", [*PROMPT, 9, 8, 7], n=2, max_tokens=12, ignore_eos=True, **SAMPLING[sampling])
        for one in (record("first", PROMPT, max_tokens=3), record("other", [3] * 240, max_tokens=3), r):
            w.tell(Submit(one))
            w.wait_end(one.session_id)
            w.settle()
        for k in range(2):
            w.wait_end(branch_id("s", k))
        want = run(make_engine(model, n_pages=128), [r])
        assert {sample: w.tokens(sample) for sample in want} == want
        assert sum(m.pages["disk"] for m in w.all(Recalled)) > 0
        assert w.cached("s") == len(PROMPT) // 8 * 8
        check_clean(w)
    finally:
        w.stop()
        engine.close()
