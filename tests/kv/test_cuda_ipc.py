"""Pages of another process on the same CUDA device."""

import signal
import time
from collections.abc import Iterator

import pytest
import torch

from kilat.base.errors import ConfigError, PeerError
from kilat.kv.board import Board
from kilat.kv.cuda_ipc import CudaIpcTransport
from tests.kv.pools import Owner, make_layout, make_offer, wait

pytest.importorskip("triton.language", reason="pages on a device are copied by a Triton kernel")
from kilat.kv.cuda_copy import copy_pages

pytestmark = pytest.mark.gpu

N, PAGE_BYTES = 512, 2 << 20


@pytest.fixture
def owner() -> Iterator[Owner]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    o = Owner(str(N), str(PAGE_BYTES), module="tests.kv.cuda_owner")
    yield o
    o.stop()


@pytest.fixture
def reader(owner: Owner) -> Iterator[tuple[CudaIpcTransport, torch.Tensor]]:
    view = torch.zeros((N, PAGE_BYTES), dtype=torch.uint8, device="cuda")
    board = Board()
    transport = CudaIpcTransport(make_layout(PAGE_BYTES), view, board, copy_pages)
    transport.connect("a", owner.endpoints["cuda_ipc"])
    yield transport, view.view(torch.int64)
    transport.close()
    board.close()


def test_pages_arrive_in_any_order(owner: Owner, reader: tuple[CudaIpcTransport, torch.Tensor]) -> None:
    transport, words = reader
    owner.tell("open", "m0", list(range(N)))
    pages, into = torch.randperm(N).tolist(), torch.randperm(N).tolist()
    for _ in range(5):
        began_s = time.perf_counter()
        transport.read(make_offer(pages), range(N), into, 10.0)
        (done,) = wait(transport)
        took_s = time.perf_counter() - began_s
        assert (done.ok, done.n_bytes) == (True, N * PAGE_BYTES)
    print(f"{N * PAGE_BYTES / took_s / 1e9:.0f} GB/s, polled every millisecond")
    want = torch.empty(N, dtype=torch.int64, device="cuda")
    want[torch.tensor(into, device="cuda")] = torch.tensor(pages, device="cuda")
    assert torch.equal(words, want[:, None].expand_as(words))


def test_withdrawn_pages_are_not_read(owner: Owner, reader: tuple[CudaIpcTransport, torch.Tensor]) -> None:
    transport, _ = reader
    owner.tell("open", "m0", [1])
    owner.tell("shut", "m0")
    transport.read(make_offer([1]), [0], [0], 5.0)
    (done,) = wait(transport)
    assert "withdrawn" in done.why


def test_owner_that_is_gone_fails_the_read(
    owner: Owner, reader: tuple[CudaIpcTransport, torch.Tensor]
) -> None:
    transport, words = reader
    owner.tell("open", "m0", [1])
    owner.signal(signal.SIGKILL)
    transport.forget("a")
    transport.read(make_offer([1]), [0], [0], 5.0)
    assert not wait(transport)[0].ok
    with pytest.raises(PeerError):
        transport.connect("a", owner.endpoints["cuda_ipc"])
    assert not words.any()


def test_own_process_and_other_layout_are_refused(reader: tuple[CudaIpcTransport, torch.Tensor]) -> None:
    transport, _ = reader
    with pytest.raises(PeerError, match="own process"):
        transport.connect("me", transport.endpoint())
    other = torch.zeros((4, 64), dtype=torch.uint8, device="cuda")
    board = Board()
    small = CudaIpcTransport(make_layout(64), other, board, copy_pages)
    with pytest.raises(PeerError, match="another layout"):
        transport.connect("small", small.endpoint())
    small.close()


def test_pool_that_is_not_on_a_device_is_refused() -> None:
    with pytest.raises(ConfigError):
        CudaIpcTransport(make_layout(64), torch.zeros((4, 64), dtype=torch.uint8), Board(), copy_pages)
