"""Layers built for two ranks: their shares put together are the layer of one rank."""

import pytest
import torch

from kilat.base.errors import ConfigError
from kilat.nn.build import Build
from kilat.nn.linear import RowParallel, column_parallel
from kilat.nn.mlp import GatedMlp
from kilat.ops import kernels
from kilat.parallel.mesh import Mesh

pytestmark = pytest.mark.cpu


class Weights:
    """Random tensors under the names of a small gated MLP and a fused projection."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = {
            "q.weight": (8, 6), "k.weight": (4, 6), "q.bias": (8,), "k.bias": (4,),
            "m.gate_proj.weight": (10, 6), "m.up_proj.weight": (10, 6), "m.down_proj.weight": (6, 10), "m.down_proj.bias": (6,),
        }  # fmt: skip
        self.tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(t.shape) for name, t in self.tensors.items()}

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.tensors[name].to(dtype)


class Share(Mesh):
    """One rank of two whose sum over the ranks is made by the test."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


def build(mesh: Mesh) -> Build:
    return Build(
        Weights(), mesh, kernels.reference(), torch.float32, torch.device("cpu"), lambda name, n: None
    )


def x() -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


def test_a_rank_has_its_share_of_every_part_of_a_fused_projection():
    reference = kernels.reference()
    parts = [("q", 8), ("k", 4)]
    whole = reference.linear(x(), column_parallel(build(Mesh()), parts, 6, bias=True))
    shares = [
        reference.linear(x(), column_parallel(build(Share(r, 2)), parts, 6, bias=True)) for r in range(2)
    ]
    q = torch.cat([s[:, :4] for s in shares], dim=1)
    k = torch.cat([s[:, 4:] for s in shares], dim=1)
    torch.testing.assert_close(torch.cat([q, k], dim=1), whole)


def test_row_parallel_shares_add_up_and_the_bias_comes_once():
    whole = RowParallel(build(Mesh()), "m.down_proj", 6, 10, bias=True)
    shares = [RowParallel(build(Share(r, 2)), "m.down_proj", 6, 10, bias=True) for r in range(2)]
    inner = torch.randn(3, 10, generator=torch.Generator().manual_seed(2))
    parts = [s(inner[:, 5 * r : 5 * r + 5]) for r, s in enumerate(shares)]
    torch.testing.assert_close(parts[0] + parts[1], whole(inner))


def test_a_gated_mlp_of_two_ranks_adds_up_to_that_of_one():
    whole = GatedMlp(build(Mesh()), "m", 6, 10, bias=False)
    shares = [GatedMlp(build(Share(r, 2)), "m", 6, 10, bias=False) for r in range(2)]
    first, second, one = (mlp.down(mlp(x())) for mlp in (*shares, whole))
    torch.testing.assert_close(first + second, one)


def test_what_the_ranks_do_not_divide_is_refused_with_the_number():
    with pytest.raises(ConfigError, match="query heads is 9"):
        Mesh(0, 2).share(9, "query heads")
    with pytest.raises(ConfigError, match="not supported yet"):
        Mesh(0, 2).all_reduce(torch.zeros(1))
    assert Mesh(1, 2).slice(8, "x") == slice(4, 8)
