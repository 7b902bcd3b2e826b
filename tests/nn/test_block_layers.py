"""Weights in GGUF's blocks: kept in every share and fusion that cuts none, dequantized elsewhere, counted as they are kept."""

import dataclasses

import pytest
import torch

from kilat.nn.build import Build
from kilat.nn.embedding import Embedding, untied_head
from kilat.nn.linear import RowParallel, column_parallel
from kilat.ops.cpu.kernels import available, cpu_kernels
from kilat.ops.linear import BlockWeight
from kilat.parallel.mesh import Mesh
from tests.ops.cpu.block_cases import blocks, values

pytestmark = pytest.mark.cpu
BF16, CPU = torch.bfloat16, torch.device("cpu")
Q4_0, Q5_0, Q8_0, Q4_K = 2, 6, 8, 12


@pytest.fixture(scope="module")
def kernels():
    usable, why = available()
    if not usable:
        pytest.skip(why)
    return cpu_kernels(1)


class Weights:
    """Matrices by name, in blocks or (``plain``) as tensors."""

    def __init__(self, **weights: BlockWeight | torch.Tensor) -> None:
        self.weights = {name.replace("__", "."): w for name, w in weights.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(w.shape) for name, w in self.weights.items()}

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        w = self.weights[name]
        return values(w, dtype) if isinstance(w, BlockWeight) else w.to(dtype)

    def get_blocks(self, name: str) -> BlockWeight | None:
        w = self.weights[name]
        return w if isinstance(w, BlockWeight) else None


class Share(Mesh):
    """One rank of several whose sum over the ranks is made by the test."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


@dataclasses.dataclass
class Heard:
    weights: list[tuple[str, int]] = dataclasses.field(default_factory=list)

    def weight(self, name: str, n_bytes: int) -> None:
        self.weights.append((name, n_bytes))


def build_of(kernels, weights, mesh=Mesh(), *, keep=True) -> tuple[Build, Heard]:
    heard = Heard()
    kept = kernels.blocks if keep else None
    return Build(weights, mesh, kernels, BF16, CPU, heard.weight, blocks=kept), heard


def x(n: int, rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(1)).to(BF16)


def is_packed_in_blocks(w) -> bool:
    """Blocks take less than two bytes a value."""
    return w.n_bytes < 2 * w.shape[0] * w.shape[1]


def test_a_fused_weight_keeps_the_blocks_of_parts_in_different_formats(kernels):
    q, v = blocks(Q5_0, 64, 256, 1), blocks(Q8_0, 32, 256, 2)
    build, heard = build_of(
        kernels, Weights(q__weight=q, v__weight=v, q__bias=torch.ones(64), v__bias=torch.zeros(32))
    )
    fused = column_parallel(build, [("q", 64), ("v", 32)], 256, bias=True)
    expected = torch.cat(
        [
            kernels.linear(x(256), kernels.blocks.pack([w], b))
            for w, b in ((q, torch.ones(64, dtype=BF16)), (v, None))
        ],
        1,
    )
    assert torch.equal(kernels.linear(x(256), fused), expected)
    assert ("q.weight", fused.n_bytes) in heard.weights
    assert sum(n for _, n in heard.weights) == fused.n_bytes + 2 * (64 + 32)


def test_a_part_without_blocks_makes_the_fused_weight_a_plain_one(kernels):
    q, v = blocks(Q4_0, 64, 64, 1), torch.randn(32, 64)
    build, heard = build_of(kernels, Weights(q__weight=q, v__weight=v))
    fused = column_parallel(build, [("q", 64), ("v", 32)], 64, bias=False)
    assert not is_packed_in_blocks(fused)
    whole = kernels.pack_linear(torch.cat([values(q, BF16), v.to(BF16)]), None)
    assert torch.equal(kernels.linear(x(64), fused), kernels.linear(x(64), whole))
    assert heard.weights == [("q.weight", 64 * 64 * 2), ("v.weight", 32 * 64 * 2)]


def test_a_build_that_keeps_no_blocks_dequantizes(kernels):
    build, _ = build_of(kernels, Weights(q__weight=blocks(Q4_0, 64, 64)), keep=False)
    assert not is_packed_in_blocks(column_parallel(build, [("q", 64)], 64, bias=False))
    assert not is_packed_in_blocks(RowParallel(build, "q", 64, 64, bias=False).weight)
    assert not is_packed_in_blocks(Embedding(build, "q.weight", (64, 64)).as_head(build))


def test_ranks_have_their_rows_of_every_part(kernels):
    weights = Weights(gate__weight=blocks(Q4_K, 64, 256, 1), up__weight=blocks(Q4_0, 64, 256, 2))
    parts = [("gate", 64), ("up", 64)]
    whole = kernels.linear(x(256), column_parallel(build_of(kernels, weights)[0], parts, 256, bias=False))
    for rank in range(2):
        build, _ = build_of(kernels, weights, Share(rank, 2))
        share = column_parallel(build, parts, 256, bias=False)
        assert is_packed_in_blocks(share)
        rows = slice(32 * rank, 32 * rank + 32)
        expected = torch.cat([whole[:, :64][:, rows], whole[:, 64:][:, rows]], 1)
        assert torch.equal(kernels.linear(x(256), share), expected)


def test_shares_of_inputs_keep_blocks_that_they_do_not_cut_and_add_up(kernels):
    weights = Weights(down__weight=blocks(Q4_0, 48, 128))
    whole = RowParallel(build_of(kernels, weights)[0], "down", 48, 128, bias=False)
    shares = [
        RowParallel(build_of(kernels, weights, Share(r, 2))[0], "down", 48, 128, bias=False) for r in range(2)
    ]
    assert all(is_packed_in_blocks(s.weight) for s in shares)
    y = sum(s(x(128)[:, 64 * r : 64 * r + 64]).float() for r, s in enumerate(shares))
    torch.testing.assert_close(y, whole(x(128)).float(), rtol=2**-7, atol=2e-3)


def test_a_share_that_would_cut_blocks_is_dequantized(kernels):
    weights = Weights(down__weight=blocks(Q4_K, 48, 256))
    build, _ = build_of(kernels, weights, Share(1, 2))
    share = RowParallel(build, "down", 48, 256, bias=False)
    assert not is_packed_in_blocks(share.weight)
    half = kernels.pack_linear(values(weights.weights["down.weight"], BF16)[:, 128:], None)
    assert torch.equal(share(x(128)), kernels.linear(x(128), half))


def test_a_tied_head_is_the_memory_of_the_embedding_and_counted_once(kernels):
    table = blocks(Q8_0, 100, 64)
    build, heard = build_of(kernels, Weights(e__weight=table))
    embedding = Embedding(build, "e.weight", (100, 64))
    ids = torch.tensor([99, 0, 7], dtype=torch.int32)
    assert torch.equal(embedding(ids), values(table, BF16)[ids.long()])
    head = embedding.as_head(build)
    assert heard.weights == [("e.weight", head.n_bytes)] and head.n_bytes < 1.3 * table.data.numel()
    assert torch.equal(kernels.linear(x(64), head), kernels.linear(x(64), kernels.blocks.pack([table], None)))


def test_a_plain_embedding_is_a_table_and_its_packed_head_is_counted_too(kernels):
    table = torch.randn(40, 32)
    build, heard = build_of(kernels, Weights(e__weight=table))
    embedding = Embedding(build, "e.weight", (40, 32))
    ids = torch.tensor([3, 3, 39], dtype=torch.int32)
    assert torch.equal(embedding(ids), table.to(BF16)[ids.long()])
    head = embedding.as_head(build)
    assert heard.weights == [("e.weight", 40 * 32 * 2), ("lm_head.weight", head.n_bytes)]


def test_a_head_of_its_own_keeps_its_blocks(kernels):
    weights = Weights(h__weight=blocks(Q8_0, 70, 64), p__weight=torch.randn(70, 64))
    build, heard = build_of(kernels, weights)
    head = untied_head(build, "h.weight", (70, 64))
    assert is_packed_in_blocks(head) and heard.weights == [("h.weight", head.n_bytes)]
    assert not is_packed_in_blocks(untied_head(build, "p.weight", (70, 64)))
