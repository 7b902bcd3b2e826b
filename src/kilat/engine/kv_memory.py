"""The page pool's memory and the ledger of who holds how many bytes."""

from dataclasses import dataclass

import numpy as np
import psutil
import torch

from kilat.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of a page: [layers, 2, page_tokens, kv_heads, head_dim] of ``dtype``, contiguous, so one span moves it."""

    layers: int
    page_tokens: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        return self.layers * 2 * self.page_tokens * self.kv_heads * self.head_dim * self.dtype.itemsize


CUDA_RESERVE_BYTES = 6 << 30
"""Device memory left for graphs, workspaces and the activations of the largest step."""


def free_bytes(device: torch.device) -> int:
    """Bytes a page pool may take: a third of the host's free memory, or what a CUDA device has left but for a reserve."""
    if device.type == "cuda":
        return max(0, torch.cuda.mem_get_info(device)[0] - CUDA_RESERVE_BYTES)
    return int(psutil.virtual_memory().available) // 3


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


def allocate_pool(layout: KvLayout, n_pages: int, device: torch.device) -> torch.Tensor:
    """[pages, layers, 2, page_tokens, kv_heads, head_dim] of zeros. On the CPU the system maps it lazily: unused pages cost nothing.

    ``torch.zeros`` would write all of it, seconds for a large pool; numpy asks the system for memory that is zero already.
    """
    shape = (n_pages, layout.layers, 2, layout.page_tokens, layout.kv_heads, layout.head_dim)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=layout.dtype, device=device)
    words = np.zeros(n_pages * layout.page_bytes // 2, np.int16)
    return torch.from_numpy(words).view(layout.dtype).view(shape)


class Ledger:
    """Bytes by owner: weights, pages, tables, workspace ... Written while an engine is built, read by ``Hello`` and ``kilat doctor``."""

    def __init__(self) -> None:
        self.owners: dict[str, int] = {}

    def add(self, owner: str, n_bytes: int) -> None:
        self.owners[owner] = self.owners.get(owner, 0) + n_bytes

    def total(self) -> int:
        return sum(self.owners.values())
