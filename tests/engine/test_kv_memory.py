"""Sizes of pages and of the pool, and the ledger."""

import mmap
import os
from types import SimpleNamespace

import psutil
import pytest
import torch

from kilat.base.errors import ConfigError
from kilat.engine import kv_memory
from kilat.engine.kv_memory import (
    CUDA_RESERVE_BYTES,
    Ledger,
    PageMemory,
    choose_pages,
    free_bytes,
    page_layout,
)

pytestmark = pytest.mark.cpu
LAYOUT = page_layout(3, 16, 2, 8, torch.bfloat16, "m")
CPU = torch.device("cpu")


def test_page_bytes_are_the_bytes_of_one_page_of_the_pool():
    kv = PageMemory(LAYOUT, 5, CPU).kv
    assert kv[0].numel() * kv.element_size() == LAYOUT.page_bytes
    assert kv[3].is_contiguous()
    assert kv.shape == (6, 3, 2, 16, 2, 8)


@pytest.mark.parametrize("shared", [False, True])
def test_the_view_is_the_memory_of_the_pages_that_may_be_moved(shared):
    pages = PageMemory(LAYOUT, 5, CPU, shared=shared)
    assert not pages.kv.any()
    assert pages.view.shape == (5, LAYOUT.page_bytes)
    pages.view[2] = pages.view[4] = 0x3F
    pages.view[4, -1] = 7
    assert (pages.kv[2].view(torch.uint8) == 0x3F).all()
    assert not pages.kv[[0, 1, 3, 5]].any()
    assert pages.kv[4].view(torch.uint8).flatten()[-1] == 7
    pages.close()


def test_another_mapping_of_a_shared_pool_sees_the_pages():
    pages = PageMemory(LAYOUT, 5, CPU, shared=True)
    with mmap.mmap(pages.fd, pages.n_bytes) as peer:
        pages.kv[3, 0, 0, 0, 0, 0] = 1.0
        at = 3 * LAYOUT.page_bytes
        assert peer[at : at + 2] == b"\x80\x3f"
        peer[at : at + 2] = b"\x00\x40"
    assert pages.kv[3, 0, 0, 0, 0, 0] == 2.0
    pages.close()


def test_pauses_get_the_memory_of_a_shared_pool_from_the_system_and_change_nothing_in_it(monkeypatch):
    monkeypatch.setattr(kv_memory, "TOUCH_BYTES", 1 << 20)
    layout = page_layout(3, 16, 16, 64, torch.bfloat16, "m")
    pages = PageMemory(layout, 25, CPU, shared=True)
    pages.view[7] = 3
    before = os.fstat(pages.fd).st_blocks * 512
    n = 0
    while pages.prepare():
        n += 1
    assert n == -(-pages.n_bytes // (1 << 20))
    assert before < pages.n_bytes // 2 < pages.n_bytes <= os.fstat(pages.fd).st_blocks * 512
    assert (pages.view[7] == 3).all() and not pages.view[[6, 8, 24]].any()
    assert not pages.prepare()
    pages.close()


def test_pauses_leave_the_host_some_memory(monkeypatch):
    host = SimpleNamespace(available=100 << 20, total=1000 << 20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    pages = PageMemory(LAYOUT, 5, CPU, shared=True)
    assert not pages.prepare()
    assert os.fstat(pages.fd).st_blocks == 0
    pages.close()


def test_pool_of_a_lone_worker_takes_memory_only_where_it_is_used():
    assert not PageMemory(LAYOUT, 5, CPU).prepare()


def test_a_closed_pool_is_no_longer_shared_but_still_there():
    pages = PageMemory(LAYOUT, 5, CPU, shared=True)
    fd = pages.fd
    pages.close()
    pages.close()
    assert pages.fd is None
    with pytest.raises(OSError):
        os.fstat(fd)
    pages.kv[4] = 1.0
    assert pages.view[4].any()


def test_a_private_pool_has_no_file():
    assert PageMemory(LAYOUT, 5, CPU).fd is None


def test_beside_the_host_the_view_is_a_tensor_of_bytes():
    view = PageMemory(LAYOUT, 5, torch.device("meta")).view
    assert isinstance(view, torch.Tensor)
    assert (view.shape, view.dtype) == ((5, LAYOUT.page_bytes), torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_pages_hold_numbers_of_the_layouts_dtype(dtype):
    layout = page_layout(1, 4, 1, 8, dtype, "m")
    pages = PageMemory(layout, 2, CPU)
    assert pages.kv.dtype == dtype
    assert layout.page_bytes == pages.view.shape[1] == 2 * 4 * 8 * dtype.itemsize


def test_only_the_host_has_a_shared_pool():
    with pytest.raises(ConfigError, match="needs the CPU"):
        PageMemory(LAYOUT, 5, torch.device("meta"), shared=True)


def test_the_layout_names_dtype_and_model():
    assert (LAYOUT.dtype, LAYOUT.model, LAYOUT.page_bytes) == ("bfloat16", "m", 3 * 2 * 16 * 2 * 8 * 2)


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


def test_engines_that_share_a_host_share_its_memory(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=12_000))
    cpu = torch.device("cpu")
    assert (free_bytes(cpu), free_bytes(cpu, 0.25)) == (4000, 1000)


def test_engines_that_share_a_device_share_all_of_it_whoever_comes_first(monkeypatch):
    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * gib)  # weights
    cuda = torch.device("cuda", 0)
    for free in (120, 70):  # before and after the other one took its part
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free * gib, 140 * gib))
        assert free_bytes(cuda, 0.5) == 70 * gib - 10 * gib - CUDA_RESERVE_BYTES
    assert free_bytes(cuda) == 70 * gib - CUDA_RESERVE_BYTES


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


def test_pages_are_saved_and_loaded_by_their_bytes():
    memory = PageMemory(LAYOUT, 3, torch.device("cpu"))
    memory.kv[1] = 0.5
    into = memory.host_bytes(LAYOUT.page_bytes)
    memory.save(1, into)
    memory.kv[1] = 0

    def fill(page):
        page[:] = into
        return True

    assert memory.load(2, fill)
    assert torch.all(memory.kv[2] == 0.5) and not memory.kv[1].any()
    assert not memory.load(0, lambda page: False)
