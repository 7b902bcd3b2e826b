"""Inputs for the parity tests of the CPU kernels, and the comparison that says where two results differ."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kilat.ops.batch import StepBatch

# dtype -> (relative, absolute). fp32: another order of a sum. bf16: up to two roundings that fall the other way (a unit in the last
# place is up to 2^-7), and the weights of values rounded once more in attention.
TOLERANCE = {torch.float32: (1e-5, 2e-5), torch.bfloat16: (2**-6, 0.012)}


def differences(got: Tensor, expected: Tensor, seed: int) -> str:
    """Empty if they agree within the table for ``got``'s dtype, else the worst coordinate with both values."""
    relative, absolute = TOLERANCE[got.dtype]
    if got.shape != expected.shape:
        return f"shape {tuple(got.shape)}, expected {tuple(expected.shape)} (seed {seed})"
    g, e = got.double(), expected.double()
    excess = torch.nan_to_num((g - e).abs() - relative * e.abs() - absolute, nan=torch.inf)
    if excess.numel() == 0 or excess.max() <= 0:
        return ""
    at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    bad = int((excess > 0).sum())
    return f"{at}: {g[at].item()!r}, expected {e[at].item()!r}; {bad} of {g.numel()} differ (seed {seed})"


def different_bits(got: Tensor, expected: Tensor, seed: int) -> str:
    """Empty if both have the same bits (NaN equals itself), else the first coordinate that differs."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return (
            f"{got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)} (seed {seed})"
        )
    as_int = {4: torch.int32, 2: torch.int16}[got.element_size()]
    other = got.contiguous().view(as_int) != expected.contiguous().view(as_int)
    if not other.any():
        return ""
    at = tuple(int(i) for i in torch.nonzero(other)[0])
    return (
        f"{at}: {got[at].item()!r}, expected {expected[at].item()!r}; {int(other.sum())} differ (seed {seed})"
    )


def normal(seed: int, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) * scale).to(dtype)


def amid_nan(x: Tensor) -> Tensor:
    """The same values as a view into a larger buffer of NaN, at an odd offset, with a row stride of its own."""
    rows, n = x.shape
    buffer = torch.full((rows * (n + 5) + 7,), torch.nan, dtype=x.dtype)
    view = buffer[3:].as_strided((rows, n), (n + 5, 1), 3)
    view.copy_(x)
    return view


@dataclass(frozen=True)
class Shape:
    n_q: int = 6
    n_kv: int = 2
    dim: int = 64
    page_tokens: int = 16


# Grouped and not, dims that fill vectors and that do not, pages that divide a tile and that do not.
SHAPES = [
    Shape(9, 3, 64, 16),
    Shape(14, 2, 64, 16),
    Shape(4, 4, 80, 7),
    Shape(8, 1, 128, 32),
    Shape(4, 2, 40, 16),
    Shape(2, 1, 256, 64),
    Shape(3, 3, 18, 5),
    Shape(24, 1, 32, 128),
]


def step(counts: list[int], lengths: list[int], shape: Shape, seed: int = 0) -> StepBatch:
    """Row b has counts[b] tokens in this step and lengths[b] tokens of context after it; its pages are scattered."""
    g = torch.Generator().manual_seed(seed)
    n_pages = [-(-n // shape.page_tokens) for n in lengths]
    order = torch.randperm(sum(n_pages) + 2, generator=g).int()
    table = torch.zeros(len(counts), max(n_pages) + 1, dtype=torch.int32)
    taken = 0
    for b, n in enumerate(n_pages):
        table[b, :n] = order[taken : taken + n]
        taken += n
    positions = torch.cat([torch.arange(k - n, k) for n, k in zip(counts, lengths)])
    row = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    slots = table[row, positions // shape.page_tokens] * shape.page_tokens + positions % shape.page_tokens
    return StepBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int32),
        positions=positions.int(),
        row_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
        kv_len=torch.tensor(lengths, dtype=torch.int32),
        page_table=table,
        slots=slots.int(),
        logits_at=torch.zeros(1, dtype=torch.int32),
        page_tokens=shape.page_tokens,
        max_kv_len=max(lengths),
        max_q_len=max(counts),
    )


def part(batch: StepBatch, row: int, first: int, n: int) -> StepBatch:
    """Tokens first .. first + n - 1 (counted in the row's own tokens of ``batch``) of one row as a step of their own."""
    start, end = batch.row_start[row].item(), batch.row_start[row + 1].item()
    length = batch.kv_len[row].item() - (end - start) + first + n
    tokens = slice(start + first, start + first + n)
    return StepBatch(
        token_ids=batch.token_ids[tokens],
        positions=batch.positions[tokens],
        row_start=torch.tensor([0, n], dtype=torch.int32),
        kv_len=torch.tensor([length], dtype=torch.int32),
        page_table=batch.page_table[row : row + 1],
        slots=batch.slots[tokens],
        logits_at=batch.logits_at,
        page_tokens=batch.page_tokens,
        max_kv_len=length,
        max_q_len=n,
    )


def pool(batch: StepBatch, shape: Shape, dtype: torch.dtype, seed: int) -> Tensor:
    """One layer's view of a pool of three layers: random keys and values where a row has tokens, NaN everywhere else."""
    n_pages = int(batch.page_table.max()) + 3
    whole = torch.full((n_pages, 3, 2, shape.page_tokens, shape.n_kv, shape.dim), torch.nan, dtype=dtype)
    kv = whole[:, 1]
    g = torch.Generator().manual_seed(seed)
    for b, length in enumerate(batch.kv_len.tolist()):
        at = torch.arange(length)
        pages, offsets = batch.page_table[b].long()[at // shape.page_tokens], at % shape.page_tokens
        for side in (0, 1):
            kv[pages, side, offsets] = torch.randn(length, shape.n_kv, shape.dim, generator=g).to(dtype)
    return kv
