"""Attention kernels against the torch reference, over mixed steps, windows and head shapes; and bitwise independence of the batch."""

import pytest
import torch

from kilat.ops import attention as reference
from kilat.ops.triton.attention import Attention
from tests.ops.triton.steps import Shape, error, pool, step

LIMIT = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
STEPS = {
    "decode": ([1, 1, 1, 1], [1, 17, 300, 64]),
    "one long row": ([1], [900]),
    "mixed": ([1, 40, 1, 3, 23], [130, 40, 5, 290, 300]),
    "one chunk after a prefix": ([33], [333]),
    "ten rows": ([1] * 9 + [2], [70, 200, 5, 64, 65, 1, 130, 7, 90, 33]),
    "a few tokens each": ([4, 2, 3], [4, 260, 129]),
}
SHAPES = [
    Shape(),
    Shape(n_q=3, n_kv=1),
    Shape(n_q=14, n_kv=2, dim=48, page_tokens=32),
    Shape(n_q=4, n_kv=4, dim=128),
]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_equals_the_reference(device, half, shape, name, exact):
    run = Attention(device, exact=exact)
    for dtype, window in ((torch.float32, 0), (half, 0), (torch.float32, 50)):
        batch = step(*STEPS[name], shape, device)
        kv = pool(batch, shape, dtype)
        q = torch.randn(len(batch.positions), shape.n_q, shape.dim).to(device, dtype)
        scale = shape.dim**-0.5
        expected = reference.attention(
            q.cpu().double(), kv.cpu().double(), _on_cpu(batch), scale=scale, window=window
        )
        got = run(q, kv, batch, scale=scale, window=window)
        assert got.shape == expected.shape and got.dtype == dtype
        assert error(got, expected) < LIMIT[dtype]


@pytest.mark.parametrize("window", [0, 50])
def test_more_rows_than_are_looked_up_one_by_one(device, window):
    """Among them rows of the other kernel, and rows without tokens as graphs have them, also at both ends."""
    counts = [(0, 1, 1, 9, 0, 0, 1)[i % 7] for i in range(267)] + [0]
    lengths = [n and n + i * 37 % 150 for i, n in enumerate(counts)]
    shape = Shape(n_q=2, n_kv=1, dim=16)
    batch = step(counts, lengths, shape, device)
    kv = pool(batch, shape, torch.float32)
    q = torch.randn(len(batch.positions), 2, 16).to(device)
    expected = reference.attention(
        q.cpu().double(), kv.cpu().double(), _on_cpu(batch), scale=0.25, window=window
    )
    assert error(Attention(device, exact=False)(q, kv, batch, scale=0.25, window=window), expected) < 2e-6


def _on_cpu(batch):
    fields = {f: getattr(batch, f) for f in batch.__slots__}
    return type(batch)(**{k: v.cpu() if torch.is_tensor(v) else v for k, v in fields.items()})
