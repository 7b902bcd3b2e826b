"""Steps with random lengths over a pool of scattered pages; what no row owns is NaN."""

from dataclasses import dataclass

import torch

from kilat.ops.batch import StepBatch


@dataclass(frozen=True)
class Shape:
    n_q: int = 8
    n_kv: int = 2
    dim: int = 64
    page_tokens: int = 16


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the Euclidean norm; NaN where anything is NaN."""
    g, e = got.double().cpu(), expected.double().cpu()
    return float((g - e).norm() / e.norm())


def step(
    counts: list[int], lengths: list[int], shape: Shape, device: torch.device, seed: int = 0
) -> StepBatch:
    """Row b has counts[b] tokens in this step and lengths[b] tokens of context after it."""
    g = torch.Generator().manual_seed(seed)
    n_pages = [-(-n // shape.page_tokens) for n in lengths]
    order = torch.randperm(sum(n_pages) + 3, generator=g)[: sum(n_pages)].tolist()
    table = torch.zeros(len(counts), max(n_pages) + 2, dtype=torch.int32)
    for b, n in enumerate(n_pages):
        table[b, :n] = torch.tensor(order[:n])
        del order[:n]
    positions = torch.cat([torch.arange(k - n, k) for n, k in zip(counts, lengths)])
    row = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    slots = table[row, positions // shape.page_tokens] * shape.page_tokens + positions % shape.page_tokens

    def put(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.int32).to(device)

    starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(counts).cumsum(0)])
    return StepBatch(
        token_ids=put(torch.zeros(len(row))), positions=put(positions), row_start=put(starts),
        kv_len=put(torch.tensor(lengths)), page_table=put(table), slots=put(slots), logits_at=put(starts[1:] - 1),
        page_tokens=shape.page_tokens, max_kv_len=max(lengths), max_q_len=max(counts),
    )  # fmt: skip


def pool(
    batch: StepBatch, shape: Shape, dtype: torch.dtype, *, layer: int = 1, seed: int = 1
) -> torch.Tensor:
    """One layer's view of a pool of 3 layers: random K and V in the rows' slots 0 .. kv_len - 1, NaN everywhere else."""
    g = torch.Generator().manual_seed(seed)
    n_pages = int(batch.page_table.max()) + 4
    size = (n_pages, 3, 2, shape.page_tokens, shape.n_kv, shape.dim)
    full = torch.full(size, float("nan"), dtype=dtype)
    table = batch.page_table.cpu()
    for b, n in enumerate(batch.kv_len.tolist()):
        for i in range(-(-n // shape.page_tokens)):
            k = min(shape.page_tokens, n - i * shape.page_tokens)
            full[table[b, i], layer, :, :k] = torch.randn(2, k, shape.n_kv, shape.dim, generator=g).to(dtype)
    return full.to(batch.kv_len.device)[:, layer]
