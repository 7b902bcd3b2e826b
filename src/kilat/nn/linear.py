"""Linear layers: column-parallel (outputs divided over the mesh) and row-parallel (inputs divided, results summed).

FP8 weights keep the blocks of the whole tensor in every share and under every fusion, where the edges are multiples of 128; elsewhere what
is fused or cut is quantized after it. GGUF's blocks stay as they are where every part has them and no block would be cut.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kilat.nn.build import Build
from kilat.ops.fp8_linear import Fp8Weight, dequantize, quantize_weight
from kilat.ops.kernels import Kernels
from kilat.ops.linear import BlockWeight, LinearWeight
from kilat.quant.fp8_blocks import cut_columns, keeps_blocks, stack_rows
from kilat.quant.gguf_blocks import cut_columns as cut_block_columns


def column_parallel(build: Build, parts: list[tuple[str, int]], n_in: int, *, bias: bool) -> LinearWeight:
    """One fused weight from ``parts``, (name without ``.weight``, total outputs), stacked in order; each part is divided over the mesh.

    The fused output of a rank is [its share of part 0, its share of part 1, ...].
    """
    rows = [build.mesh.slice(n_out, f"outputs of {name}") for name, n_out in parts]
    biases = [build.take(f"{n}.bias", (n_out,))[r] for (n, n_out), r in zip(parts, rows)] if bias else None
    b = None if biases is None else torch.cat(biases)
    blocks = [build.read_blocks(f"{n}.weight", (n_out, n_in)) for n, n_out in parts]
    shares = [
        BlockWeight(w.data[r], w.ggml_type, (r.stop - r.start, n_in)) for w, r in zip(blocks, rows) if w
    ]
    if len(shares) == len(parts):
        return pack_blocks(build, f"{parts[0][0]}.weight", shares, b)
    if not build.fp8:
        weights = [build.take(f"{n}.weight", (n_out, n_in))[r] for (n, n_out), r in zip(parts, rows)]
        return build.kernels.pack_linear(torch.cat(weights), b)
    found = [(f"{name}.weight", build.read_linear(f"{name}.weight", (n_out, n_in))) for name, n_out in parts]
    if keeps_blocks(rows):
        fused = stack_rows([_as_fp8(w) for _, w in found], rows)
    else:
        fused = quantize_weight(
            torch.cat([_as_tensor(build, name, w)[r] for (name, w), r in zip(found, rows)])
        )
    # the first name stands for all that was fused
    return _pack(build, f"{parts[0][0]}.weight", fused, b)


def _as_fp8(w: Fp8Weight | Tensor) -> Fp8Weight:
    return w if isinstance(w, Fp8Weight) else quantize_weight(w)


def _as_tensor(build: Build, name: str, w: Fp8Weight | Tensor) -> Tensor:
    """A weight that is to be quantized in blocks other than its own: in fp32 when it has been quantized before."""
    if isinstance(w, Tensor):
        return w
    build.on_requantized(name)
    return dequantize(w, torch.float32)


def _pack(build: Build, name: str, w: Fp8Weight, bias: Tensor | None) -> LinearWeight:
    packed = build.pack_fp8(w, bias)
    build.on_weight(name, packed.n_bytes)
    return packed


def pack_blocks(
    build: Build, name: str, parts: Sequence[BlockWeight], bias: Tensor | None = None
) -> LinearWeight:
    """Weights that stay in their blocks, one after the other; counted under ``name``. Only where the build keeps blocks."""
    assert build.blocks is not None
    packed = build.blocks.pack(parts, bias)
    build.on_weight(name, packed.n_bytes)
    return packed


class RowParallel:
    """y = all_reduce(x W^T) + b: x [T, K / ranks] -> [T, N]. The bias is added once, by rank 0."""

    def __init__(self, build: Build, name: str, n_out: int, n_in: int, *, bias: bool) -> None:
        columns = build.mesh.slice(n_in, f"inputs of {name}")
        b = build.take(f"{name}.bias", (n_out,)) if bias else None
        b = b if build.mesh.tp_rank == 0 else None
        blocks = build.read_blocks(f"{name}.weight", (n_out, n_in))
        kept = cut_block_columns(blocks, columns) if blocks else None
        if kept is not None:
            self.weight = pack_blocks(build, f"{name}.weight", [kept], b)
        elif build.fp8:
            w = build.read_linear(f"{name}.weight", (n_out, n_in))
            if keeps_blocks([columns]):
                share = cut_columns(_as_fp8(w), columns)
            else:
                share = quantize_weight(_as_tensor(build, f"{name}.weight", w)[:, columns])
            self.weight = _pack(build, f"{name}.weight", share, b)
        else:
            weight = build.take(f"{name}.weight", (n_out, n_in))[:, columns]
            self.weight = build.kernels.pack_linear(weight, b)
        self.mesh, self.kernels = build.mesh, build.kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self.mesh.all_reduce(self.kernels.linear(x, self.weight))

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, feed: Kernels
    ) -> tuple[Tensor, Tensor]:
        """feed.add_rms_norm(self(x), residual, weight, eps), for the products of ``feed`` only."""
        if self.mesh.tp_size == 1:
            return feed.linear_add_rms_norm(x, self.weight, residual, weight, eps)
        return feed.add_rms_norm(self(x), residual, weight, eps)
