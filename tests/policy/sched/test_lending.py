"""Pages of a prefix that one scheduler lends to another, and news of the index."""

import pytest

from kilat.base import metrics
from kilat.base.hashing import root_hash
from kilat.policy.cache.table import extend_chain
from tests.policy.sched.fakes import Rig, alone
from tests.policy.sched.moving import PROMPT, copy_pages, rows_of

pytestmark = pytest.mark.logic


def test_lent_pages_make_a_prefix_hit_elsewhere():
    old, new = Rig(), Rig()
    old.submit("a", PROMPT)
    old.run()
    chain: list[bytes] = []
    extend_chain(chain, root_hash("fake"), PROMPT, 4, 2)
    lent = old.scheduler.lend([*chain, b"nobody has this"])
    assert len(lent) == 2 and old.gauge(metrics.PAGES_PINNED) == 2
    new.scheduler.seal_arrived(copy_pages(old, lent, new), chain)
    old.scheduler.unpin(lent)
    assert new.gauge(metrics.PAGES_CACHED) == 2 and new.gauge(metrics.PAGES_PINNED) == 0
    r = new.submit("b", PROMPT)
    new.run()
    assert rows_of(new, "b")[0] == (8, 2)
    assert new.events[0].cached_tokens == 8
    assert new.output["b"] == alone(r, 0, 128)[0]


def test_nothing_known_lends_nothing():
    rig = Rig()
    assert rig.scheduler.lend([b"x"]) == []
    assert rig.gauge(metrics.PAGES_PINNED) == 0


def test_lent_pages_are_not_evicted():
    rig = Rig(n_pages=5)
    rig.submit("a", PROMPT[:4], max_tokens=1)
    rig.run()
    lent = rig.scheduler.lend(rig.scheduler.page_names())
    rig.submit("b", [9] * 12, max_tokens=3)
    rig.run()
    assert rig.runner.kv[lent[0]] == PROMPT[:4]
    rig.scheduler.unpin(lent)


def test_fetched_pages_that_are_there_already_become_free():
    rig = Rig()
    rig.submit("a", PROMPT)
    rig.run()
    names = rig.scheduler.page_names()
    n_cached = rig.gauge(metrics.PAGES_CACHED)
    rig.scheduler.seal_arrived(rig.scheduler.reserve(1), names[:1])
    rig.scheduler.check()
    assert rig.gauge(metrics.PAGES_CACHED) == n_cached
    assert rig.gauge(metrics.PAGES_USED) == 0


def test_without_a_prefix_cache_fetched_pages_become_free():
    rig = Rig(prefix_cache=False)
    rig.scheduler.seal_arrived(rig.scheduler.reserve(2), [b"x", b"y"])
    assert rig.gauge(metrics.PAGES_FREE) == 64
    assert rig.scheduler.page_names() == []


def test_changes_of_the_index_are_told_once_and_the_collector_is_one():
    rig = Rig()
    changes = rig.scheduler.watch_pages()
    rig.submit("a", PROMPT, max_tokens=1)
    rig.run()
    assert rig.scheduler.watch_pages() is changes
    stored, dropped = changes.take()
    assert (sorted(stored), dropped) == (sorted(rig.scheduler.page_names()), [])


def test_evicted_page_is_told_while_its_content_is_there():
    rig = Rig(n_pages=6)
    told: list[tuple[bytes, list[int]]] = []
    rig.scheduler.watch_evictions(lambda name, page: told.append((name, list(rig.runner.kv[page]))))
    rig.submit("a", PROMPT[:9], max_tokens=1)
    rig.run()
    names = rig.scheduler.page_names()
    assert rig.scheduler.n_known([*names, b"x"]) == 2 and rig.scheduler.n_known([b"x", *names]) == 0
    rig.submit("b", [9] * 20, max_tokens=3)
    rig.run()
    assert dict(told)[names[0]] == PROMPT[:4] and dict(told)[names[1]] == PROMPT[4:8]
    n_told = len(told)
    assert rig.scheduler.reserve(6) is not None  # a move takes cached pages too
    assert len(told) > n_told


def test_rate_of_prompts_is_measured():
    rig = Rig()
    assert rig.scheduler.prefill_token_s is None
    rig.submit("a", PROMPT)
    rig.run()
    assert rig.scheduler.prefill_token_s is not None and rig.scheduler.prefill_token_s > 0
