"""Gated MLP: down(silu(gate(x)) * up(x)); the product with down is for the caller."""

from torch import Tensor

from kilat.nn.build import Build
from kilat.nn.linear import RowParallel, column_parallel


class GatedMlp:
    """x [T, hidden] -> what ``down`` takes [T, inner]; gate and up are one fused product."""

    def __init__(self, build: Build, name: str, hidden: int, inner: int, *, bias: bool) -> None:
        parts = [(f"{name}.gate_proj", inner), (f"{name}.up_proj", inner)]
        self.gate_up = column_parallel(build, parts, hidden, bias=bias)
        self.down = RowParallel(build, f"{name}.down_proj", hidden, inner, bias=bias)
        self.feed_down = build.kernels.feeding(self.down.weight)

    def __call__(self, x: Tensor) -> Tensor:
        return self.feed_down.gated_linear(x, self.gate_up)
