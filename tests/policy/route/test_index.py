"""PrefixIndex against a model that keeps plain sets."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.policy.route.index import PrefixIndex
from kilat.wire.messages import PagesChanged

pytestmark = pytest.mark.logic


def chain(tag: str, n: int) -> list[bytes]:
    return [f"{tag}{i:06}".encode() for i in range(n)]


def told(index: PrefixIndex, worker: str, *messages: PagesChanged) -> list[bool]:
    return [index.apply(worker, m) for m in messages]


def plain_holders(held: dict[str, set[bytes]], names: list[bytes]) -> dict[str, int]:
    out = {}
    for worker, mine in held.items():
        n = next((i for i, name in enumerate(names) if name not in mine), len(names))
        if n:
            out[worker] = n
    return out


def test_holders_are_the_longest_known_start_of_each_worker():
    index = PrefixIndex()
    a = chain("a", 10)
    assert told(index, "w1", PagesChanged(0, a, [])) == [True]
    assert told(index, "w2", PagesChanged(0, a[:4], [])) == [True]
    told(index, "w3", PagesChanged(0, chain("b", 3), []))
    assert index.holders(a) == {"w1": 10, "w2": 4}
    assert index.holders(a[:3]) == {"w1": 3, "w2": 3}
    assert index.holders([*a, b"more"]) == {"w1": 10, "w2": 4}
    assert index.holders([b"unknown", *a]) == {}
    assert index.holders([]) == {}


def test_dropped_pages_are_held_no_more_and_the_evictor_is_remembered():
    index = PrefixIndex()
    a = chain("a", 5)
    told(index, "w1", PagesChanged(0, a, []), PagesChanged(1, [], a[3:]))
    assert index.holders(a) == {"w1": 3}
    assert index.was_dropped(a[3]) == "w1"
    assert index.was_dropped(a[0]) is None
    told(index, "w2", PagesChanged(0, a, []))
    assert index.was_dropped(a[3]) is None  # somebody holds it


def test_page_that_is_dropped_twice_in_one_message_is_dropped_once():
    index = PrefixIndex()
    a = chain("a", 5)
    told(index, "w1", PagesChanged(0, a, []), PagesChanged(1, [], [a[4], a[4], b"unknown"]))
    assert index.holders(a) == {"w1": 4}
    index.forget("w1")
    assert index.holders(a) == {}


def test_only_so_many_evictions_are_remembered():
    index = PrefixIndex(remember=2)
    a = chain("a", 4)
    told(index, "w1", PagesChanged(0, a, []), PagesChanged(1, [], a))
    assert [index.was_dropped(name) for name in a] == [None, None, "w1", "w1"]


def test_gap_asks_for_a_resync_and_changes_nothing_until_the_whole_list_comes():
    index = PrefixIndex()
    a, b = chain("a", 3), chain("b", 2)
    assert told(index, "w1", PagesChanged(0, a, []), PagesChanged(2, b, [])) == [True, False]
    assert index.is_behind("w1")
    assert index.holders(b) == {}
    assert index.holders(a) == {"w1": 3}  # the old knowledge stays a hint
    assert told(index, "w1", PagesChanged(3, b, [], whole=True)) == [True]
    assert not index.is_behind("w1")
    assert index.holders(a) == {}
    assert index.holders(b) == {"w1": 2}


def test_an_unanswered_resync_is_asked_again_after_some_messages():
    index = PrefixIndex(ask_every=4)
    answers = told(index, "w1", *[PagesChanged(seq, [], []) for seq in range(5, 14)])
    assert answers == [False, True, True, True, False, True, True, True, False]


def test_a_worker_too_far_ahead_holds_nothing():
    index = PrefixIndex(max_behind=10)
    a = chain("a", 3)
    told(index, "w1", PagesChanged(0, a, []), PagesChanged(9, [], []))
    assert index.holders(a) == {"w1": 3}
    told(index, "w1", PagesChanged(11, [], []))
    assert index.holders(a) == {}
    assert not index.names("w1")


def test_a_lost_last_message_is_found_by_the_number_in_the_status():
    index = PrefixIndex()
    a = chain("a", 3)
    told(index, "w1", PagesChanged(0, a, []))
    assert index.confirm("w1", 0)
    assert not index.confirm("w1", 1)
    assert not index.confirm("w1", 1)  # a later status asks again
    told(index, "w1", PagesChanged(2, a[:1], [], whole=True))
    assert index.confirm("w1", 2)
    assert index.holders(a) == {"w1": 1}


def test_a_worker_that_has_said_nothing_is_asked():
    index = PrefixIndex()
    assert not index.confirm("w1", -1)
    told(index, "w1", PagesChanged(0, chain("a", 2), [], whole=True))
    assert index.confirm("w1", 0)


def test_doubled_and_late_messages_change_nothing():
    index = PrefixIndex()
    a = chain("a", 3)
    told(index, "w1", PagesChanged(0, a, []), PagesChanged(1, [], a), PagesChanged(0, a, []))
    assert index.holders(a) == {}
    assert not index.is_behind("w1")


def test_a_whole_list_older_than_a_seen_message_asks_again():
    index = PrefixIndex()
    a = chain("a", 3)
    assert told(index, "w1", PagesChanged(5, [], [])) == [False]
    assert told(index, "w1", PagesChanged(4, a, [], whole=True)) == [False]
    assert index.is_behind("w1")
    assert told(index, "w1", PagesChanged(6, a, [], whole=True)) == [True]


def test_a_forgotten_worker_starts_from_nothing_and_its_place_is_used_again():
    index = PrefixIndex()
    a = chain("a", 3)
    told(index, "w1", PagesChanged(0, a, []))
    told(index, "w2", PagesChanged(0, a[:2], []))
    index.forget("w1")
    index.forget("w1")
    assert index.holders(a) == {"w2": 2}
    told(index, "w3", PagesChanged(0, a[:1], []))
    assert index.holders(a) == {"w2": 2, "w3": 1}
    assert told(index, "w1", PagesChanged(0, [], [])) == [True]
    assert not index.names("w1")


# one step of a worker's cache: a chain (of two) grows to a depth or shrinks to it
STEPS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(0, 40), st.booleans()), max_size=40
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_random_changes_lost_messages_and_resyncs_agree_with_plain_sets(steps):
    index = PrefixIndex()
    held: dict[str, set[bytes]] = {}
    seqs: dict[str, int] = {}
    for worker, tag, depth, is_lost in steps:
        mine, names = held.setdefault(worker, set()), chain(tag, 40)
        stored = [n for n in names[:depth] if n not in mine]
        dropped = [n for n in names[depth:] if n in mine]
        mine.update(stored)
        mine.difference_update(dropped)
        seq = seqs[worker] = seqs.get(worker, -1) + 1
        if is_lost:
            continue
        if not index.apply(worker, PagesChanged(seq, stored, dropped)):
            seqs[worker] += 1
            assert index.apply(worker, PagesChanged(seqs[worker], sorted(mine), [], whole=True))
    for worker, seq in seqs.items():
        if not index.confirm(worker, seq):
            index.apply(worker, PagesChanged(seq + 1, sorted(held[worker]), [], whole=True))
    for tag in "xy":
        assert index.holders(chain(tag, 40)) == plain_holders(held, chain(tag, 40))


class Branches:
    """Chains that share starts, and what each worker holds of them: always whole starts, as the pool of a worker keeps them."""

    def __init__(self, chains: list[list[bytes]]) -> None:
        self.chains = chains
        self.held: dict[str, set[bytes]] = {}
        self.seqs: dict[str, int] = {}
        self.index = PrefixIndex()

    def tell(self, worker: str, stored: list[bytes], dropped: list[bytes], *, whole: bool = False) -> None:
        seq = self.seqs[worker] = self.seqs.get(worker, -1) + 1
        assert self.index.apply(worker, PagesChanged(seq, stored, dropped, whole=whole))

    def grow(self, worker: str, depths: list[int], chunk: int) -> None:
        """Messages that each name the next ``chunk`` pages of every chain."""
        mine = self.held.setdefault(worker, set())
        for first in range(0, max(depths), chunk):
            pages = [n for c, depth in zip(self.chains, depths) for n in c[first : min(first + chunk, depth)]]
            stored = list(dict.fromkeys(n for n in pages if n not in mine))
            mine.update(stored)
            self.tell(worker, stored, [])

    def shrink(self, worker: str, depths: list[int]) -> None:
        """Ends of chains are evicted, the furthest page first."""
        mine = self.held.setdefault(worker, set())
        kept = {n for c, depth in zip(self.chains, depths) for n in c[:depth]}
        dropped = [n for c in self.chains for n in reversed(c) if n in mine and n not in kept]
        mine.intersection_update(kept)
        self.tell(worker, [], list(dict.fromkeys(dropped)))

    def whole(self, worker: str, depths: list[int]) -> None:
        self.held[worker] = {n for c, depth in zip(self.chains, depths) for n in c[:depth]}
        names = [n for c in self.chains for n in c if n in self.held[worker]]
        self.tell(worker, list(dict.fromkeys(names)), [], whole=True)

    def forget(self, worker: str) -> None:
        self.index.forget(worker)
        self.held.pop(worker, None)
        self.seqs.pop(worker, None)


DEPTHS = st.lists(st.integers(0, 24), min_size=4, max_size=4)
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "shrink", "whole", "forget"]), st.integers(0, 5), DEPTHS, st.integers(1, 9)
    ),
    max_size=16,
)


@settings(max_examples=60, deadline=None)
@given(ACTIONS, st.integers(0, 12), st.integers(0, 12))
def test_chains_that_share_starts_have_the_holders_that_plain_sets_say(actions, shared, twice_shared):
    starts = chain("s", shared)
    a, b, c = starts + chain("a", 24 - shared), starts + chain("b", 24 - shared), chain("c", 24)
    world = Branches([a, b, c, a[:twice_shared] + chain("d", 24 - twice_shared)])
    for action, number, depths, chunk in actions:
        worker = f"w{number}"
        if action == "grow":
            world.grow(worker, depths, chunk)
        elif action == "forget":
            world.forget(worker)
        else:
            getattr(world, action)(worker, depths)
        for names in world.chains:
            assert world.index.holders(names) == plain_holders(world.held, names)
            assert world.index.holders(names[:7]) == plain_holders(world.held, names[:7])
    assert set(world.index._runs) == set().union(*world.held.values())


class Counting(dict):
    """Counts what is looked up: reads can be bounded in a test, where times on a busy machine cannot."""

    n = 0

    def get(self, *args):
        self.n += 1
        return super().get(*args)


@pytest.mark.parametrize(("n_workers", "n_reads"), [(1, 12), (8, 30), (32, 75)])
def test_lookup_reads_few_names_of_a_long_chain(n_workers, n_reads):
    """8,000 tokens of pages, holders at different depths."""
    index = PrefixIndex()
    chains = [[os.urandom(16) for _ in range(512)] for _ in range(3)]
    depths = {f"w{k}": (k * 311 + 60) % 512 for k in range(n_workers)}
    for worker, depth in depths.items():
        told(index, worker, PagesChanged(0, [name for c in chains for name in c[:depth]], []))
    index._runs = Counting(index._runs)
    assert index.holders(chains[1]) == depths
    assert index._runs.n <= n_reads


@pytest.mark.parametrize(("n_workers", "n_reads"), [(1, 2), (8, 26), (32, 52)])
def test_lookup_reads_few_names_where_workers_told_of_the_chain_in_parts(n_workers, n_reads):
    """Prompts that were computed in chunks of 32 pages, so that a run of names ends at each chunk and at each worker's last page."""
    index = PrefixIndex()
    names = [os.urandom(16) for _ in range(512)]
    depths = {f"w{k}": 512 - (k * 311) % 500 for k in range(n_workers)}
    for worker, depth in depths.items():
        parts = [names[i : min(i + 32, depth)] for i in range(0, depth, 32)]
        told(index, worker, *(PagesChanged(seq, part, []) for seq, part in enumerate(parts)))
    index._runs = Counting(index._runs)
    assert index.holders(names) == depths
    assert index._runs.n <= n_reads


def test_a_run_that_lost_its_end_is_not_believed_to_have_it():
    index = PrefixIndex()
    a, b = chain("a", 3), chain("b", 1)
    told(index, "w1", PagesChanged(0, [*a, *b], []), PagesChanged(1, [], [a[2]]))
    told(index, "w2", PagesChanged(0, [*a, *b], []), PagesChanged(1, [], [b[0]]))
    assert index.holders([*a, b"more"]) == {"w1": 2, "w2": 3}
    assert index.holders(b) == {"w1": 1}
