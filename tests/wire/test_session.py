"""The portable record: everything of a session goes into it and comes back, and nothing else does."""

import msgspec
import pytest
from hypothesis import given

from kilat.base.ids import new_seed, new_session_id
from kilat.wire.sampling import SamplingParams
from kilat.wire.session import SESSION_VERSION, SessionRecord
from tests.wire import builds

pytestmark = pytest.mark.logic


def there_and_back(record: SessionRecord) -> SessionRecord:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=SessionRecord)


@given(builds.records)
def test_record_comes_back_equal(record: SessionRecord) -> None:
    assert there_and_back(record) == record
    assert msgspec.json.decode(msgspec.json.encode(record), type=SessionRecord) == record


@given(builds.records)
def test_record_has_one_spelling(record: SessionRecord) -> None:
    assert msgspec.msgpack.encode(there_and_back(record)) == msgspec.msgpack.encode(record)


def test_new_session_needs_three_fields_and_starts_at_zero() -> None:
    record = SessionRecord(new_session_id(), [1, 2], SamplingParams(seed=new_seed()))
    assert (record.output_ids, record.branch, record.epoch, record.page_hashes) == ([], 0, 0, [])
    assert (record.tenant, record.salt, record.priority, record.arrival_s) == ("", "", 0, 0.0)
    assert record.version == SESSION_VERSION
    assert there_and_back(record) == record


def test_lists_of_two_records_are_not_shared() -> None:
    a, b = (SessionRecord("a", [1], SamplingParams()) for _ in range(2))
    assert a.output_ids is not b.output_ids and a.page_hashes is not b.page_hashes
    assert a.params.logit_bias is not b.params.logit_bias


def test_record_cannot_be_changed() -> None:
    record = SessionRecord("a", [1], SamplingParams())
    for name in SessionRecord.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(record, name, getattr(record, name))


def test_adopted_record_is_the_old_one_with_a_new_epoch_and_more_output() -> None:
    old = SessionRecord("a", [1], SamplingParams(seed=3), arrival_s=2.5, tenant="t", salt="s", priority=4)
    new = there_and_back(msgspec.structs.replace(old, epoch=1, output_ids=[5, 6]))
    same = set(SessionRecord.__struct_fields__) - {"epoch", "output_ids"}
    assert (new.epoch, new.output_ids) == (1, [5, 6])
    assert all(getattr(new, name) == getattr(old, name) for name in same)


def test_unknown_field_is_refused() -> None:
    body = msgspec.to_builtins(SessionRecord("a", [1], SamplingParams()))
    assert msgspec.convert(body, SessionRecord).session_id == "a"
    with pytest.raises(msgspec.ValidationError, match="colour"):
        msgspec.convert({**body, "colour": "red"}, SessionRecord)
    with pytest.raises(msgspec.ValidationError, match="colour"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({**body, "colour": "red"}), type=SessionRecord)


@pytest.mark.parametrize("name", ["session_id", "prompt_ids", "params"])
def test_field_without_a_default_is_required(name: str) -> None:
    body = msgspec.to_builtins(SessionRecord("a", [1], SamplingParams()))
    del body[name]
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.convert(body, SessionRecord)


def test_page_hashes_stay_bytes() -> None:
    record = SessionRecord("a", [1], SamplingParams(), page_hashes=[bytes(range(16)), b"\xff" * 16])
    assert there_and_back(record).page_hashes == [bytes(range(16)), b"\xff" * 16]


def test_long_session_costs_about_its_tokens() -> None:
    record = SessionRecord("ses-1", list(range(30_000)), SamplingParams())
    assert len(msgspec.msgpack.encode(record)) < 3 * 30_000 + 300
