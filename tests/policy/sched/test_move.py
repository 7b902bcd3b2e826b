"""A session leaves one scheduler as a record and goes on in another."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.base.errors import LimitError, NotFoundError, RequestError
from kilat.base.hashing import branch_seed, root_hash
from kilat.policy.cache.table import extend_chain
from kilat.wire.session import SessionRecord
from tests.policy.sched.fakes import EOS, Rig, alone

pytestmark = pytest.mark.logic


def test_record_of_a_waiting_session_is_what_was_submitted():
    rig = Rig()
    r = rig.submit("a", [1, 2, 3], epoch=4, tenant="t", salt="s", priority=2, arrival_s=1.5)
    assert rig.scheduler.export("a") == r


def test_record_of_a_running_session_has_its_output_and_page_hashes():
    rig = Rig()
    r = rig.submit("a", range(7), max_tokens=20, salt="s")
    for _ in range(6):
        rig.step()
    out = rig.scheduler.export("a")
    assert out.output_ids == rig.output["a"] == alone(r, 0, 128)[0][:6]
    assert out.epoch == r.epoch
    chain: list[bytes] = []
    extend_chain(chain, root_hash("fake", "s"), [*range(7), *out.output_ids], 4, 3)
    assert out.page_hashes == chain


def test_exported_session_keeps_running():
    rig = Rig()
    r = rig.submit("a", [1, 2, 3])
    rig.step()
    out = rig.scheduler.export("a")
    rig.run()
    assert rig.output["a"] == alone(r, 0, 128)[0]
    assert len(out.output_ids) == 1


def test_record_does_not_change_when_the_session_goes_on():
    rig = Rig()
    rig.submit("a", [1, 2, 3], max_tokens=9)
    rig.step()
    out = rig.scheduler.export("a")
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(out), type=SessionRecord)
    rig.run()
    assert out == copy


@pytest.mark.parametrize("session_id", ["x", "a"])
def test_unknown_and_finished_sessions_cannot_be_exported(session_id: str):
    rig = Rig()
    rig.submit("a", [1])
    rig.run()
    with pytest.raises(NotFoundError):
        rig.scheduler.export(session_id)


@settings(max_examples=40)
@given(
    cut=st.integers(0, 11),
    depth=st.sampled_from([1, 2]),
    seed=st.integers(-(2**63), 2**63 - 1),
    stops=st.sets(st.integers(0, EOS), max_size=12),
    min_tokens=st.integers(0, 6),
)
def test_moved_session_goes_on_with_the_same_tokens(
    cut: int, depth: int, seed: int, stops: set[int], min_tokens: int
):
    old, new = Rig(depth=depth), Rig(depth=depth, page_tokens=8)
    r = old.submit(
        "a", [3, 1, 4, 1, 5], seed=seed, max_tokens=12, stop_token_ids=tuple(stops), min_tokens=min_tokens
    )
    for _ in range(cut):
        if "a" not in old.finish:
            old.step()
    output, finish, _ = alone(r, 0, 128)
    if "a" in old.finish:
        assert (old.output["a"], old.finish["a"]) == (output, finish)
        return
    record = msgspec.structs.replace(old.scheduler.export("a"), epoch=1)
    new.scheduler.submit(record, 0.0)
    new.run()
    assert old.output.get("a", []) + new.output["a"] == output
    assert new.finish["a"] == finish
    assert [e.seq for e in new.events] == list(
        range(len(record.output_ids), len(record.output_ids) + len(new.events))
    )
    assert {e.epoch for e in new.events} == {1}


def test_adopted_session_is_a_prefill_of_prompt_and_output():
    rig = Rig()
    rig.submit("a", [1, 2, 3], output_ids=[4, 5], max_tokens=4)
    plan = rig.step()
    [row], [admitted] = plan.rows, plan.admitted
    assert (row.start, row.token_ids, row.sample) == (0, [1, 2, 3, 4, 5], True)
    assert (admitted.token_ids, admitted.n_prompt) == ([1, 2, 3, 4, 5], 3)
    rig.run()
    assert len(rig.output["a"]) == 2


def test_adopted_session_takes_prefix_hits_in_its_output_too():
    rig = Rig()
    r = rig.submit("a", range(6), max_tokens=9)
    rig.run()
    rig.submit("b", range(6), max_tokens=9, output_ids=rig.output["a"][:8])
    plan = rig.step()
    assert plan.rows[0].start == 12
    assert next(e for e in rig.events if e.session_id == "b").cached_tokens == 6  # prompt tokens
    rig.run()
    assert rig.output["b"] == alone(r, 0, 128)[0][8:]


def test_adopted_session_does_not_report_its_prompt_again():
    rig = Rig()
    rig.submit("a", [1, 2, 3], output_ids=[4], prompt_logprobs=2)
    rig.run()
    assert not any(r.prompt_logprobs for p in rig.plans for r in p.rows)
    assert {e.prompt_logprobs for e in rig.events} == {None}


@pytest.mark.parametrize("k", [0, 1, 2])
def test_adopted_sample_is_one_session_with_its_own_seed(k: int):
    rig = Rig()
    old = Rig()
    r = old.submit("a", range(6), n=3, seed=5, max_tokens=6)
    for _ in range(4):
        old.step()
    record = old.scheduler.export("a" if k == 0 else f"a#{k}")
    assert record.branch == k
    rig.scheduler.submit(record, 0.0)
    rig.run()
    assert list(rig.finish) == [record.session_id]
    assert rig.plans[0].admitted[0].seed == branch_seed(5, k)
    assert record.output_ids + rig.output[record.session_id] == alone(r, k, 128)[0]


def test_first_sample_takes_the_samples_along_that_have_not_started():
    old, new = Rig(max_step_tokens=4), Rig()
    r = old.submit("a", range(6), n=3)
    old.step()
    new.scheduler.submit(old.scheduler.export("a"), 0.0)
    new.run()
    assert {k: new.output[f"a#{k}"] for k in (1, 2)} == {k: alone(r, k, 128)[0] for k in (1, 2)}


def test_complete_session_cannot_be_adopted():
    with pytest.raises(RequestError, match="max_tokens"):
        Rig().submit("a", [1, 2], output_ids=[3, 4], max_tokens=2)
    with pytest.raises(LimitError, match="prompt and output so far have 8 tokens"):
        Rig(max_model_len=8).submit("a", [1] * 5, output_ids=[2] * 3, max_tokens=None)
