"""Linear layers: column-parallel (outputs divided over the mesh) and row-parallel (inputs divided, results summed)."""

import torch
from torch import Tensor

from kilat.nn.build import Build
from kilat.ops.linear import LinearWeight


def column_parallel(build: Build, parts: list[tuple[str, int]], n_in: int, *, bias: bool) -> LinearWeight:
    """One fused weight from ``parts``, (name without ``.weight``, total outputs), stacked in order; each part is divided over the mesh.

    The fused output of a rank is [its share of part 0, its share of part 1, ...].
    """
    weights, biases = [], []
    for name, n_out in parts:
        rows = build.mesh.slice(n_out, f"outputs of {name}")
        weights.append(build.take(f"{name}.weight", (n_out, n_in))[rows])
        if bias:
            biases.append(build.take(f"{name}.bias", (n_out,))[rows])
    return build.kernels.pack_linear(torch.cat(weights), torch.cat(biases) if bias else None)


class RowParallel:
    """y = all_reduce(x W^T) + b: x [T, K / ranks] -> [T, N]. The bias is added once, by rank 0."""

    def __init__(self, build: Build, name: str, n_out: int, n_in: int, *, bias: bool) -> None:
        columns = build.mesh.slice(n_in, f"inputs of {name}")
        weight = build.take(f"{name}.weight", (n_out, n_in))[:, columns]
        b = build.take(f"{name}.bias", (n_out,)) if bias else None
        self.weight = build.kernels.pack_linear(weight, b if build.mesh.tp_rank == 0 else None)
        self.mesh, self.kernels = build.mesh, build.kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self.mesh.all_reduce(self.kernels.linear(x, self.weight))
