"""Random work on a small pool beside a model that remembers what was written where."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kilat.base.hashing import root_hash
from kilat.policy.cache.pool import PagePool
from kilat.policy.cache.table import PageTable, extend_chain

pytestmark = pytest.mark.logic
N_PAGES, PAGE_TOKENS = 9, 2
ROOT = root_hash("model")
# two token ids only, so that different owners often write the same content
tokens_of_few = st.lists(st.integers(0, 1), min_size=1, max_size=11)


def chain_of(tokens: list[int]) -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, ROOT, tokens, PAGE_TOKENS, len(tokens) // PAGE_TOKENS)
    return chain


class Owner:
    """A table and the tokens that were written into it."""

    def __init__(self, table: PageTable, tokens: list[int]) -> None:
        self.table = table
        self.tokens = tokens
        self.seen: list[int] = []


class PoolMachine(RuleBasedStateMachine):
    """``content``: what each page holds, the whole prefix up to its end. It is checked whenever a page is found or read."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(N_PAGES, PAGE_TOKENS)
        self.live: list[Owner] = []
        self.content: dict[int, tuple[int, ...]] = {}

    def write(self, owner: Owner, tokens: list[int], start: int, *, seal: bool) -> None:
        end = owner.table.cover(len(tokens))
        owner.tokens = tokens[:end]
        for i in range(start // PAGE_TOKENS, len(owner.table.pages)):
            self.content[owner.table.pages[i]] = tuple(owner.tokens[: (i + 1) * PAGE_TOKENS])
        if seal:
            chain = chain_of(owner.tokens)
            owner.table.seal(chain, len(chain))

    @rule(target=owners, tokens=tokens_of_few, look=st.booleans(), seal=st.booleans())
    def arrive(self, tokens: list[int], look: bool, seal: bool):
        hits = self.pool.match(chain_of(tokens)) if look else []
        for i, page in enumerate(hits):
            assert self.content[page] == tuple(tokens[: (i + 1) * PAGE_TOKENS]), (
                "found a page with other content"
            )
        owner = Owner(PageTable(self.pool, hits, len(hits)), [])
        self.live.append(owner)
        self.write(owner, tokens, len(hits) * PAGE_TOKENS, seal=seal)
        return owner

    @rule(owner=owners, more=tokens_of_few, seal=st.booleans())
    def grow(self, owner: Owner, more: list[int], seal: bool):
        self.write(owner, owner.tokens + more, len(owner.tokens), seal=seal)

    @rule(target=owners, owner=owners, data=st.data())
    def fork(self, owner: Owner, data: st.DataObject):
        n = data.draw(st.integers(0, len(owner.tokens)))
        forked = owner.table.fork(n)
        if forked is None:
            assert self.pool.n_available == 0
            return multiple()
        table, copies = forked
        assert len(copies) == (n % PAGE_TOKENS > 0)
        for _, destination in copies:
            self.content[destination] = tuple(owner.tokens[:n])
        twin = Owner(table, owner.tokens[:n])
        self.live.append(twin)
        return twin

    @rule(owner=consumes(owners))
    def leave(self, owner: Owner):
        self.live.remove(owner)
        owner.table.release()

    @invariant()
    def books_balance(self):
        self.pool.check([o.table.pages for o in self.live])
        assert self.pool.n_free + self.pool.n_used + self.pool.n_cached == N_PAGES

    @invariant()
    def tables_hold_what_was_written_and_only_grow(self):
        for o in self.live:
            assert o.table.pages[: len(o.seen)] == o.seen
            o.seen = list(o.table.pages)
            for i in range(len(o.tokens) // PAGE_TOKENS):
                assert self.content[o.table.pages[i]] == tuple(o.tokens[: (i + 1) * PAGE_TOKENS])

    @invariant()
    def sealed_pages_are_found_as_long_as_they_are_used(self):
        for o in self.live:
            n = o.table.n_sealed
            assert len(self.pool.match(chain_of(o.tokens)[:n])) == n

    @invariant()
    def parent_is_never_evicted_before_its_child(self):
        """What can be found can be found from the root on: no hash in the index without its parent."""
        found = {self.content[page] for page in self.pool._index.values()}
        assert all(len(c) == PAGE_TOKENS or c[:-PAGE_TOKENS] in found for c in found)

    def teardown(self):
        for o in self.live:
            o.table.release()
        assert self.pool.n_used == 0


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPoolMachine = PoolMachine.TestCase
