"""The page pool's memory and the ledger of who holds how many bytes."""

import fcntl
import mmap
import os
from collections.abc import Callable

import numpy as np
import psutil
import torch
from torch import Tensor

from kilat.base.errors import ConfigError
from kilat.wire.kv import KvLayout


def page_layout(
    layers: int, page_tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype, model: str
) -> KvLayout:
    """Layout of pages [layers, 2, page_tokens, kv_heads, head_dim] of ``dtype``; ``model`` names whose KV they hold."""
    page_bytes = layers * 2 * page_tokens * kv_heads * head_dim * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    return KvLayout(layers, page_tokens, kv_heads, head_dim, name, page_bytes, model)


CUDA_RESERVE_BYTES = 6 << 30
"""Device memory left for graphs, workspaces and the activations of the largest step."""


def free_bytes(device: torch.device, share: float = 1.0) -> int:
    """Bytes a page pool may take: a third of the host's free memory, or what a CUDA device has left but for a reserve. ``share``: of the
    engine that asks, when others are started beside it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own = int(total * share) - torch.cuda.memory_reserved(device)
        return max(0, min(free, own) - CUDA_RESERVE_BYTES)
    return int(psutil.virtual_memory().available * share) // 3


def choose_pages(
    layout: KvLayout, *, asked_bytes: int | None, free_bytes: int, sessions: int, max_model_len: int
) -> int:
    """Pages of the pool: ``asked_bytes`` worth of them, or else what is free, never more than the sessions could use.

    Raises ConfigError when one session of ``max_model_len`` tokens would not fit.
    """
    per_session = -(-max_model_len // layout.page_tokens)
    budget = free_bytes if asked_bytes is None else asked_bytes
    pages = budget // layout.page_bytes
    if pages < per_session:
        need = per_session * layout.page_bytes
        raise ConfigError(
            f"the KV cache of {budget:,} bytes holds {pages * layout.page_tokens:,} tokens, one session may have "
            f"{max_model_len:,}: give it {need:,} bytes or lower the maximum model length"
        )
    return pages if asked_bytes is not None else min(pages, sessions * per_session)


POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` of Linux 5.14: what a first write to each of its pages would do, for a whole range at once."""

TOUCH_BYTES = 8 << 20
"""Memory that one pause gets from the system: some milliseconds."""

LEFT_SHARE = 0.1
"""Of the host's memory: what pauses leave to others."""


class PageMemory:
    """The memory of a pool: ``n_pages`` pages of ``layout``, zero at first, and one more that no session ever owns.

    ``kv`` is what the model sees, [n_pages + 1, layers, 2, page_tokens, kv_heads, head_dim]; ``view`` the bytes of the pages that may be
    moved, uint8 [n_pages, page_bytes]: a numpy array over the same memory on the CPU, a tensor on CUDA. ``fd`` is the memory file of a
    shared pool, page after page from offset 0, else None. Whoever writes a page owns it by the scheduler's word (``reserve``).
    """

    def __init__(self, layout: KvLayout, n_pages: int, device: torch.device, *, shared: bool = False) -> None:
        self.layout = layout
        self.n_pages = n_pages
        self.fd: int | None = None
        self._map: mmap.mmap | None = None
        self._n_touched = 0
        self._staging: np.ndarray | None = None
        shape = (
            n_pages + 1,
            layout.layers,
            2,
            layout.page_tokens,
            layout.kv_heads,
            layout.head_dim,
        )
        dtype = getattr(torch, layout.dtype)
        self.kv: Tensor
        self.view: np.ndarray | Tensor
        if device.type != "cpu":
            if shared:
                raise ConfigError(f"a shared pool needs the CPU, the device is {device.type}")
            self.kv = torch.zeros(shape, dtype=dtype, device=device)
            self.view = self.kv.view(torch.uint8).view(n_pages + 1, layout.page_bytes)[:n_pages]
            if device.type == "cuda":  # now: pinned memory and a first stream wait for what the device runs
                self._staging = self.host_bytes(layout.page_bytes)
                self.save(0, self._staging)
            return
        words = self._shared_bytes() if shared else np.zeros((n_pages + 1) * layout.page_bytes, np.uint8)
        self.kv = torch.from_numpy(words).view(dtype).view(shape)
        self.view = words.reshape(n_pages + 1, layout.page_bytes)[:n_pages]

    @property
    def n_bytes(self) -> int:
        return (self.n_pages + 1) * self.layout.page_bytes

    def _shared_bytes(self) -> np.ndarray:
        """Memory that other processes can map too, sealed so that it cannot shrink under them. It takes room only where it is touched, by a
        step, a peer's pages or :meth:`prepare`."""
        self.fd = os.memfd_create("kilat-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.n_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._map = mmap.mmap(self.fd, self.n_bytes)
        return np.frombuffer(self._map, np.uint8)

    def prepare(self) -> bool:
        """Get some more of a shared pool's memory from the system, so that no step and no read has to: pages that are new to the system cost
        several times what copying them does. False when all is there, or the host has little left."""
        n = min(self.n_bytes - self._n_touched, TOUCH_BYTES)
        if self._map is None or n <= 0:
            return False
        host = psutil.virtual_memory()
        if host.available - n < LEFT_SHARE * host.total:
            return False
        try:
            self._map.madvise(POPULATE_WRITE, self._n_touched, n)
        except OSError:  # this system does not have it
            self._map = None
            return False
        self._n_touched += n
        return True

    # -- pages to and from the host's memory; not while a step writes them --------------------------------------------------------

    def save(self, page: int, into: np.ndarray) -> None:
        """Copy a page to ``into``, uint8 [page_bytes]. On a device it waits for this copy, and not for the step that runs."""
        if isinstance(self.view, np.ndarray):
            np.copyto(into, self.view[page])
            return
        self._copy(torch.from_numpy(into), self.view[page])

    def load(self, page: int, fill: Callable[[np.ndarray], bool]) -> bool:
        """Let ``fill`` write a page's bytes, uint8 [page_bytes], and say whether it has; on a device they are copied there then. For one
        thread at a time, which may be another than the engine's."""
        if isinstance(self.view, np.ndarray):
            return fill(self.view[page])
        assert self._staging is not None
        if not fill(self._staging):
            return False
        self._copy(self.view[page], torch.from_numpy(self._staging))
        return True

    def host_bytes(self, n_bytes: int) -> np.ndarray:
        """New memory of the host, uint8 [n_bytes], that a device copies to and from fast."""
        pinned = not isinstance(self.view, np.ndarray)
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=pinned).numpy()

    def _copy(self, to: Tensor, source: Tensor) -> None:
        with torch.cuda.device(self.kv.device):
            stream = torch.cuda.Stream()  # of its own, from a pool that torch keeps
            with torch.cuda.stream(stream):
                to.copy_(source, non_blocking=True)
            stream.synchronize()

    def close(self) -> None:
        """Close the memory file: who has not mapped it yet no longer can. The memory itself lives as long as somebody uses it."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class Ledger:
    """Bytes by owner: weights, pages, tables, workspace ... Written while an engine is built, read by ``Hello`` and ``kilat doctor``."""

    def __init__(self) -> None:
        self.owners: dict[str, int] = {}

    def add(self, owner: str, n_bytes: int) -> None:
        self.owners[owner] = self.owners.get(owner, 0) + n_bytes

    def total(self) -> int:
        return sum(self.owners.values())
