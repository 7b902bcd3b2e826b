"""The table of moves against a model: no page is free while somebody may read or write it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kilat.base.errors import EngineError
from kilat.kv.moves import Move, Moves, State

pytestmark = pytest.mark.logic

IDS = st.sampled_from([f"m{k}" for k in range(5)])


def move(move_id: str, pages: list[int], until_s: float = 10.0) -> Move:
    return Move(move_id, "a", "s", 0, pages, until_s, State.OFFERED)


class Table(RuleBasedStateMachine):
    """Pages are numbers that grow, so each is given out once."""

    def __init__(self) -> None:
        super().__init__()
        self.moves = Moves()
        self.now_s = 0.0
        self.n = 0
        self.out: dict[str, Move] = {}
        self.reading: dict[str, tuple[Move, bool]] = {}

    def pages(self) -> list[int]:
        self.n += 2
        return [self.n, self.n + 1]

    @rule(i=IDS, limit_s=st.integers(1, 5))
    def offer(self, i: str, limit_s: int) -> None:
        m = move(i, self.pages(), self.now_s + limit_s)
        if i in self.out:
            with pytest.raises(EngineError):
                self.moves.offer(m)
        else:
            self.moves.offer(m)
            self.out[i] = m

    @rule(i=IDS)
    def release(self, i: str) -> None:
        n_done = self.moves.counts[State.DONE]
        known = self.out.pop(i, None)
        assert self.moves.release(i) is known
        assert self.moves.counts[State.DONE] == n_done + (known is not None)

    @rule(seconds=st.integers(0, 3))
    def time_goes_by(self, seconds: int) -> None:
        self.now_s += seconds
        late = {i for i, m in self.out.items() if m.until_s <= self.now_s}
        assert {m.move_id for m in self.moves.overdue(self.now_s)} == late
        for i in late:
            assert self.out.pop(i).state is State.FAILED

    @rule(i=IDS)
    def begin(self, i: str) -> None:
        m = move(i, self.pages())
        if i in self.reading:
            with pytest.raises(EngineError):
                self.moves.begin(m)
        else:
            self.moves.begin(m)
            self.reading[i] = (m, False)

    @rule(i=IDS)
    def drop(self, i: str) -> None:
        self.moves.drop(i)
        if i in self.reading:
            self.reading[i] = (self.reading[i][0], True)

    @rule(i=IDS, ok=st.booleans())
    def end(self, i: str, ok: bool) -> None:
        if i not in self.reading:
            with pytest.raises(EngineError):
                self.moves.ended(i, ok=ok)
            return
        m, dropped = self.reading.pop(i)
        assert self.moves.ended(i, ok=ok) is m
        assert m.state is (State.DONE if ok and not dropped else State.FAILED)

    @invariant()
    def pages_are_accounted_for(self) -> None:
        held = self.moves.n_pages()
        assert held[State.OFFERED] == 2 * len(self.out)
        assert held[State.QUARANTINED] == 2 * sum(dropped for _, dropped in self.reading.values())
        assert held.total() == 2 * (len(self.out) + len(self.reading))
        assert len(self.moves) == len(list(self.moves)) == len(self.out) + len(self.reading)
        assert self.moves.n_offered == len(self.out)
        assert all(self.moves.is_reading(i) for i in self.reading)


TestTable = Table.TestCase
TestTable.settings = settings(max_examples=30, stateful_step_count=25)


def test_release_twice_does_nothing() -> None:
    moves = Moves()
    moves.offer(move("m", [1]))
    assert moves.release("m") is not None
    assert moves.release("m") is None
    assert moves.counts == {State.DONE: 1}


def test_own_offer_and_own_read_of_one_id_are_two_moves() -> None:
    moves = Moves()
    moves.offer(move("m", [1]))
    moves.begin(move("m", [2]))
    assert moves.ended("m", ok=True).pages == [2]
    released = moves.release("m")
    assert released is not None
    assert released.pages == [1]
