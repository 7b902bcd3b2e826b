"""The board of open moves, against a plain set."""

import mmap
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.base.errors import CapacityError, PeerError
from kilat.kv.board import BOARD_BYTES, SLOTS, Board, PeerBoard

pytestmark = pytest.mark.logic

IDS = [f"move-{k}" for k in range(6)]


def seen(board: Board) -> PeerBoard:
    assert board.fd is not None
    return PeerBoard(mmap.mmap(board.fd, BOARD_BYTES, prot=mmap.PROT_READ), board.nonce)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(IDS))))
def test_peer_sees_exactly_the_moves_that_are_open(steps: list[tuple[bool, str]]) -> None:
    board = Board()
    peer = seen(board)
    model: set[str] = set()
    for opens, move in steps:
        if not opens:
            board.shut(move)
            model.discard(move)
        elif move not in model:
            board.open(move, [1])
            model.add(move)
        assert {m for m in IDS if peer.is_open(m)} == model
        assert {m for m in IDS if board.covers(m, [1])} == model
    board.close()
    assert not any(peer.is_open(m) for m in IDS)


def test_move_covers_its_own_pages_only() -> None:
    board = Board(shared=False)
    board.open("a", [1, 2])
    board.open("b", [2, 3])
    assert board.covers("a", [2, 1])
    assert board.covers("a", [])
    assert not board.covers("a", [3])
    assert not board.covers("c", [])
    board.shut("a")
    assert board.covers("b", [2])
    assert not board.covers("a", [])


def test_open_twice_is_an_error() -> None:
    board = Board(shared=False)
    board.open("a", [1])
    with pytest.raises(PeerError, match="open already"):
        board.open("a", [2])
    assert board.covers("a", [1])


def test_full_board_refuses_until_a_move_is_shut() -> None:
    board = Board(shared=False)
    for k in range(SLOTS - 1):
        board.open(f"m{k}", [1])
    board.open("a", [1])
    with pytest.raises(CapacityError, match="limit 4,096"):
        board.open("c", [1])
    board.shut("a")
    board.open("c", [1])
    assert board.covers("c", [1])


def forge(change: Callable[[bytearray], None]) -> mmap.mmap:
    board = Board()
    assert board.fd is not None
    data = bytearray(mmap.mmap(board.fd, BOARD_BYTES, prot=mmap.PROT_READ)[:])
    change(data)
    memory = mmap.mmap(-1, BOARD_BYTES)
    memory[:] = bytes(data)
    return memory


def test_memory_that_is_not_this_board_is_refused() -> None:
    for change in (lambda d: None, lambda d: d.__setitem__(slice(0, 8), bytes(8))):
        with pytest.raises(PeerError, match="another process"):
            PeerBoard(forge(change), b"some other nonce")
    with pytest.raises(PeerError):
        PeerBoard(mmap.mmap(-1, BOARD_BYTES // 2), bytes(16))
