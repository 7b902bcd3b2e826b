"""Server-sent events cut at any byte."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilat.base.errors import PeerError
from kilat.cli import sse
from kilat.cli.sse import SseSplitter

pytestmark = pytest.mark.logic

BODY = (
    'event: x\r\ndata: {"a":1}\r\n\r\n: comment\n\ndata:{"b":"é data: "}\n\nid: 3\ndata: [DONE]\n\n'.encode()
)
PAYLOADS = [b'{"a":1}', '{"b":"é data: "}'.encode(), b"[DONE]"]


@given(st.lists(st.integers(0, len(BODY)), max_size=20))
def test_payloads_do_not_depend_on_where_the_bytes_are_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(BODY)]
    splitter = SseSplitter()
    got = [p for a, b in pairwise(edges) for p in splitter.push(BODY[a:b])]
    assert got == PAYLOADS


def test_unfinished_line_is_not_a_payload() -> None:
    splitter = SseSplitter()
    assert splitter.push(b"data: 1") == []
    assert splitter.push(b"2\n") == [b"12"]


def test_endless_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    splitter = SseSplitter()
    with pytest.raises(PeerError, match="event of over 100 bytes"):
        for _ in range(20):
            splitter.push(b"data: 7777777")
