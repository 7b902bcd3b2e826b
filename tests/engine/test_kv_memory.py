"""Sizes of pages and of the pool, and the ledger."""

import pytest
import torch

from kilat.base.errors import ConfigError
from kilat.engine.kv_memory import KvLayout, Ledger, allocate_pool, choose_pages

pytestmark = pytest.mark.cpu
LAYOUT = KvLayout(layers=3, page_tokens=16, kv_heads=2, head_dim=8, dtype=torch.bfloat16)


def test_page_bytes_are_the_bytes_of_one_page_of_the_pool():
    pool = allocate_pool(LAYOUT, 5, torch.device("cpu"))
    assert pool[0].numel() * pool.element_size() == LAYOUT.page_bytes
    assert pool[3].is_contiguous()


def test_asked_bytes_are_used_up_but_not_exceeded():
    pages = choose_pages(
        LAYOUT, asked_bytes=LAYOUT.page_bytes * 10 + 7, free_bytes=0, sessions=4, max_model_len=100
    )
    assert pages == 10


def test_a_pool_too_small_for_one_session_is_refused_with_the_bytes_it_needs():
    with pytest.raises(ConfigError, match=f"{7 * LAYOUT.page_bytes:,}"):
        choose_pages(LAYOUT, asked_bytes=LAYOUT.page_bytes * 6, free_bytes=0, sessions=4, max_model_len=100)


def test_without_a_wish_the_pool_is_no_larger_than_the_sessions_can_use():
    rich = LAYOUT.page_bytes * 10_000
    assert choose_pages(LAYOUT, asked_bytes=None, free_bytes=rich, sessions=4, max_model_len=100) == 28


def test_without_a_wish_a_poor_machine_gets_what_is_free():
    poor = LAYOUT.page_bytes * 9
    assert choose_pages(LAYOUT, asked_bytes=None, free_bytes=poor, sessions=4, max_model_len=100) == 9
    with pytest.raises(ConfigError, match="lower the maximum model length"):
        choose_pages(LAYOUT, asked_bytes=None, free_bytes=LAYOUT.page_bytes, sessions=4, max_model_len=100)


def test_the_ledger_sums_by_owner():
    ledger = Ledger()
    ledger.add("weights", 5)
    ledger.add("weights", 6)
    ledger.add("pages", 1)
    assert ledger.owners == {"weights": 11, "pages": 1}
    assert ledger.total() == 12
