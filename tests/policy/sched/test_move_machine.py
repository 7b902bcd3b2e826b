"""Random work on two schedulers between which sessions and pages move: same tokens as alone, no page lost, none with two owners."""

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from kilat.base import metrics
from kilat.base.errors import CapacityError
from kilat.base.hashing import root_hash
from kilat.base.ids import branch_id
from kilat.policy.cache.table import extend_chain
from kilat.policy.sched.moves import Arrived, Departed
from kilat.policy.sched.session import State
from kilat.wire.sampling import Grammar
from kilat.wire.session import SessionRecord
from tests.policy.sched.fakes import EOS, Rig, alone

pytestmark = pytest.mark.logic

worlds = st.fixed_dictionaries(
    {
        "page_tokens": st.sampled_from([1, 2, 3, 4]),
        "max_model_len": st.integers(6, 30),
        "prefix_cache": st.sampled_from([True, True, False]),
    }
)
sides = st.fixed_dictionaries(
    {
        "spare_pages": st.integers(0, 12),
        "max_num_seqs": st.integers(1, 6),
        "max_step_tokens": st.integers(1, 24),
        "max_waiting": st.integers(1, 12),
        "depth": st.sampled_from([1, 2]),
    }
)
params = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 3),
        "n": st.sampled_from([1, 1, 1, 2, 4]),
        "max_tokens": st.sampled_from([None, 1, 2, 5, 12]),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), (), tuple(range(0, EOS, 5))]),
        "prompt_logprobs": st.sampled_from([None, None, None, 0]),
        "grammar": st.sampled_from([None, None, None, Grammar("json_object")]),
        "tenant": st.sampled_from(["a", "b"]),
        "priority": st.sampled_from([0, 0, 0, 1, -1]),
    }
)
prompts = st.tuples(st.integers(0, 8), st.lists(st.integers(0, 1), max_size=10)).map(
    lambda x: [0, 0, 1] * x[0] + x[1]
)


@dataclass(eq=False)
class Move:
    """A session between two sides. ``held``: the source still pins its pages; ``reserved``: the destination's pages for them."""

    gone: Departed
    source: Rig
    held: bool = True
    reserved: list[int] | None = None


class MoveMachine(RuleBasedStateMachine):
    """Two rigs; each checks its own invariants after every operation."""

    @initialize(world=worlds, config=st.tuples(sides, sides))
    def start(self, world: dict, config: tuple[dict, dict]):
        need = -(-world["max_model_len"] // world["page_tokens"])
        self.rigs = []
        for side in config:
            n_pages = need + side["spare_pages"]
            own = {k: v for k, v in side.items() if k != "spare_pages"}
            self.rigs.append(Rig(n_pages=n_pages, **world, **own))
        self.index = [set() for _ in self.rigs]
        self.news = [rig.scheduler.watch_pages() for rig in self.rigs]
        self.records: dict[str, SessionRecord] = {}
        self.aborted: set[str] = set()
        self.moved: set[str] = set()
        self.moves: list[Move] = []

    def other(self, rig: Rig) -> Rig:
        return self.rigs[1 - self.rigs.index(rig)]

    # -- ordinary work ----------------------------------------------------------------------------------------------------------

    @rule(prompt=prompts, options=params, side=st.integers(0, 1), hand_over=st.booleans())
    def submit(self, prompt: list[int], options: dict, side: int, hand_over: bool):
        rig = self.rigs[side]
        session_id = f"s{len(self.records)}"
        prompt = (prompt or [0])[: rig.config.max_session_tokens - 1]
        try:
            r = rig.submit(session_id, prompt, hand_over=hand_over, **options)
        except CapacityError:
            return
        self.records[session_id] = r

    @rule(side=st.integers(0, 1))
    def step(self, side: int):
        self.rigs[side].step()

    @rule(side=st.integers(0, 1))
    def plan_or_commit(self, side: int):
        rig = self.rigs[side]
        if len(rig.in_flight) < rig.config.depth:
            rig.plan()
        else:
            rig.commit()

    @precondition(lambda self: self.records)
    @rule(data=st.data(), alone=st.booleans())
    def abort(self, data: st.DataObject, alone: bool):
        session_id = data.draw(st.sampled_from(sorted(self.records)))
        for rig in self.rigs:
            rig.abort(f"{session_id}#0" if alone else session_id)
        for move in list(self.moves):
            moving = move.gone.record
            if alone:  # a record that stands for all samples must arrive, for the others
                hit = moving.session_id == session_id and moving.n_sessions == 1
            else:
                hit = self.root_of(moving.session_id) == session_id
            if hit:
                self.end(move)
        samples = 1 if alone else self.records[session_id].params.n
        self.aborted |= {branch_id(session_id, k) for k in range(samples)}

    @rule(data=st.data(), side=st.integers(0, 1))
    def preempt(self, data: st.DataObject, side: int):
        roster = self.rigs[side].scheduler._roster
        free = {s.id: s for s in (*roster.running, *roster.parked) if s.n_flight == 0}
        if free:
            roster.preempt(free[data.draw(st.sampled_from(sorted(free)))])
            self.rigs[side].scheduler.check()

    # -- moves ------------------------------------------------------------------------------------------------------------------

    @rule(data=st.data(), side=st.integers(0, 1))
    def freeze(self, data: st.DataObject, side: int):
        scheduler = self.rigs[side].scheduler
        live = scheduler._roster.live.values()
        ids = sorted(s.id for s in live if s.state is not State.HELD and s.id not in self.moved)
        if ids:
            scheduler.freeze(data.draw(st.sampled_from(ids)))
            scheduler.check()

    @rule(side=st.integers(0, 1))
    def depart(self, side: int):
        rig = self.rigs[side]
        for session_id in rig.scheduler.take_frozen():
            self.moves.append(Move(rig.scheduler.depart(session_id), rig))
            self.moved |= {session_id, *(branch_id(self.root_of(session_id), k) for k in range(4))}
            rig.scheduler.check()

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), share=st.integers(0, 4))
    def reserve(self, data: st.DataObject, share: int):
        self.make_room(data.draw(st.sampled_from(self.moves)), share)

    def make_room(self, move: Move, share: int):
        """Reserve for some of the pages, the first ones; all with ``share`` 4."""
        rig = self.other(move.source)
        if move.reserved is None and move.held:
            move.reserved = rig.scheduler.reserve(-(-len(move.gone.pages) * share // 4))
            for page in move.reserved or ():
                rig.runner.kv[page] = [None] * rig.config.page_tokens

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), share=st.integers(0, 4))
    def adopt(self, data: st.DataObject, share: int):
        move = data.draw(st.sampled_from(self.moves))
        self.make_room(move, share)
        self.finish(move)

    @precondition(lambda self: self.moves)
    @rule(data=st.data())
    def lose(self, data: st.DataObject):
        """The source gives up on the offer before the pages were read."""
        move = data.draw(st.sampled_from(self.moves))
        if move.held:
            move.held = False
            move.source.scheduler.unpin(move.gone.pages)
            if move.reserved:
                self.other(move.source).scheduler.unpin(move.reserved)
            move.reserved = None

    def finish(self, move: Move):
        rig, gone = self.other(move.source), move.gone
        arrived = None
        if move.reserved is not None:
            for source, target in zip(gone.pages, move.reserved):
                rig.runner.kv[target] = list(move.source.runner.kv[source])
            n_tokens = min(gone.n_tokens, len(move.reserved) * rig.config.page_tokens)
            arrived = Arrived(move.reserved, n_tokens)
        record = replace(gone.record, epoch=gone.record.epoch + 1)
        rig.scheduler.submit(record, rig.now_s, arrived)
        rig.scheduler.check()
        move.reserved = None
        self.end(move)

    def end(self, move: Move):
        """Nobody needs the move any more."""
        self.moves.remove(move)
        if move.held:
            move.source.scheduler.unpin(move.gone.pages)
        if move.reserved is not None:
            self.other(move.source).scheduler.unpin(move.reserved)

    @precondition(lambda self: self.records)
    @rule(data=st.data(), side=st.integers(0, 1))
    def fetch_prefix(self, data: st.DataObject, side: int):
        """One side reads the start of a prompt that the other has."""
        source, target = self.rigs[side], self.rigs[1 - side]
        r = self.records[data.draw(st.sampled_from(sorted(self.records)))]
        chain: list[bytes] = []
        page_tokens = source.config.page_tokens
        extend_chain(chain, root_hash("fake"), r.prompt_ids, page_tokens, len(r.prompt_ids) // page_tokens)
        lent, have = source.scheduler.lend(chain), target.scheduler.lend(chain)
        missing = lent[len(have) :]
        reserved = target.scheduler.reserve(len(missing))
        if reserved is not None:
            for page, copy in zip(missing, reserved):
                target.runner.kv[copy] = list(source.runner.kv[page])
            target.scheduler.seal_arrived(reserved, chain[len(have) : len(lent)])
        target.scheduler.unpin(have)
        source.scheduler.unpin(lent)
        for rig in self.rigs:
            rig.scheduler.check()

    # -- what must hold -----------------------------------------------------------------------------------------------------------

    @invariant()
    def reserved_pages_are_touched_by_no_step(self):
        for move in getattr(self, "moves", []):
            reserved = set(move.reserved or ())
            for plan, _ in self.other(move.source).in_flight:
                assert not reserved.intersection(page for copy in plan.copies for page in copy)
                assert not any(reserved.intersection(row.pages) for row in plan.rows)

    @invariant()
    def changes_of_the_index_add_up_to_it(self):
        for i, rig in enumerate(getattr(self, "rigs", [])):
            stored, dropped = self.news[i].take()
            assert not self.index[i].intersection(stored) and self.index[i].issuperset(dropped)
            self.index[i] = (self.index[i] - set(dropped)) | set(stored)
            assert self.index[i] == set(rig.scheduler.page_names())

    def teardown(self):
        if not hasattr(self, "rigs"):
            return
        for _ in range(4000):
            if not self.moves and not any(rig.scheduler.has_work for rig in self.rigs):
                break
            for side, rig in enumerate(self.rigs):
                rig.step()
                self.depart(side)
            for move in list(self.moves):
                self.make_room(move, 4)
                self.finish(move)
        else:
            raise AssertionError("does not come to an end")
        for r in self.records.values():
            for k in range(r.params.n):
                self.check_output(r, k)
        for rig in self.rigs:
            assert rig.gauge(metrics.PAGES_USED) == rig.gauge(metrics.PAGES_PINNED) == 0

    def check_output(self, r: SessionRecord, k: int):
        session_id = branch_id(r.session_id, k)
        output, finish, _ = alone(r, k, self.rigs[0].config.max_session_tokens)
        parts = [rig for rig in self.rigs if session_id in rig.output]
        parts.sort(key=lambda rig: next(e.epoch for e in rig.events if e.session_id == session_id))
        got = [token for rig in parts for token in rig.output[session_id]]
        ends = [rig.finish[session_id] for rig in parts if session_id in rig.finish]
        if session_id in self.aborted and ends in ([], ["abort"]):
            assert got == output[: len(got)]
        else:
            assert (got, ends) == (output, [finish])

    @staticmethod
    def root_of(session_id: str) -> str:
        return session_id.split("#")[0]


MoveMachine.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
TestMoveMachine = MoveMachine.TestCase
