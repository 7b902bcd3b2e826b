"""What a block needs while it is being built: weights by name, the mesh, the kernel set and the dtype."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kilat.base.errors import ModelFileError
from kilat.ops.fp8_linear import BLOCK, FP8, Fp8Weight, dequantize
from kilat.ops.kernels import BlockOps, Kernels
from kilat.ops.linear import BlockWeight, LinearWeight
from kilat.parallel.mesh import Mesh

DUMMY_SIZE = 0.02
DUMMY_VALUES = 1 << 24


class WeightSource(Protocol):
    """Weights of a checkpoint under their Hugging Face names; ``load.weights.Weights`` is one."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def get(self, name: str, dtype: torch.dtype) -> Tensor: ...

    def get_fp8(self, name: str) -> Fp8Weight | None: ...

    def get_blocks(self, name: str) -> BlockWeight | None: ...


@dataclass(frozen=True, slots=True)
class Build:
    """Passed down while a model is constructed. ``on_weight`` hears the bytes of every tensor as it is kept (progress, ledger).

    ``fp8``: the linear weights of layers are FP8 blocks, as stored or quantized here. ``on_requantized`` hears the names of those whose
    stored blocks do not fit the shares or the fusion of this build. ``blocks``: the kernel set's products with GGUF's blocks, for matrices
    that are stored in them to stay so; None: all are dequantized.
    """

    weights: WeightSource
    mesh: Mesh
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    on_weight: Callable[[str, int], None]
    fp8: bool = False
    on_requantized: Callable[[str], None] = lambda name: None
    blocks: BlockOps | None = None

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor called ``name`` in the build's dtype and device; raises ModelFileError when it is missing or has another shape."""
        tensor = self.read(name, shape)
        self.on_weight(name, tensor.numel() * tensor.element_size())
        return tensor

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """:meth:`take` without a word to ``on_weight``: for tensors that are not kept as they are."""
        self._check(name, shape)
        return self.weights.get(name, self.dtype).to(self.device)

    def read_linear(self, name: str, shape: tuple[int, int]) -> Fp8Weight | Tensor:
        """:meth:`read`, but a weight that is stored in FP8 blocks stays as it is."""
        self._check(name, shape)
        stored = self.weights.get_fp8(name)
        if stored is None:
            return self.weights.get(name, self.dtype).to(self.device)
        return Fp8Weight(stored.data.to(self.device), stored.scale.to(self.device))

    def read_blocks(self, name: str, shape: tuple[int, int]) -> BlockWeight | None:
        """A matrix in the blocks it is stored in; None when it has none or this build has no product with them."""
        if self.blocks is None:
            return None
        self._check(name, shape)
        w = self.weights.get_blocks(name)
        return w if w is not None and w.ggml_type in self.blocks.types else None

    def pack_fp8(self, w: Fp8Weight, bias: Tensor | None) -> LinearWeight:
        """``w`` for the kernel set; dequantized if that has no FP8 product."""
        if self.kernels.pack_fp8 is not None:
            return self.kernels.pack_fp8(w, bias)
        return self.kernels.pack_linear(dequantize(w, self.dtype), bias)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        found = self.weights.shapes().get(name)
        if found is None:
            raise ModelFileError(f"the checkpoint has no tensor {name}; expected one of shape {list(shape)}")
        if found != shape:
            raise ModelFileError(f"tensor {name} has shape {list(found)}, the config asks for {list(shape)}")


class NoWeights:
    """A checkpoint without tensors, for builds that make their own."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        raise ModelFileError(f"there is no tensor {name}: this build has no checkpoint")

    def get_fp8(self, name: str) -> Fp8Weight | None:
        return None

    def get_blocks(self, name: str) -> BlockWeight | None:
        return None


class DummyBuild(Build):
    """Gives random weights in whatever shape is asked for, made on the device: measurements without a checkpoint."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        return tensor.fill_(1.0) if len(shape) == 1 else tensor.normal_(0.0, DUMMY_SIZE)

    def read_linear(self, name: str, shape: tuple[int, int]) -> Fp8Weight | Tensor:
        """Numbers of the size that quantized weights have; never more than a few rows exist in another type."""
        n_out, n_in = shape
        data = torch.empty(shape, dtype=FP8, device=self.device)
        for rows in data.split(max(1, DUMMY_VALUES // n_in)):
            numbers = torch.empty(rows.shape, dtype=self.dtype, device=self.device)
            rows.copy_(numbers.normal_(0.0, 100.0).clamp_(-448, 448))
        blocks = (-(-n_out // BLOCK), -(-n_in // BLOCK))
        return Fp8Weight(data, torch.full(blocks, DUMMY_SIZE / 100, device=self.device))
