"""What a block needs while it is being built: weights by name, the mesh, the kernel set and the dtype."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kilat.base.errors import ModelFileError
from kilat.ops.kernels import Kernels
from kilat.parallel.mesh import Mesh


class WeightSource(Protocol):
    """Weights of a checkpoint under their Hugging Face names; ``load.weights.Weights`` is one."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def get(self, name: str, dtype: torch.dtype) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Build:
    """Passed down while a model is constructed. ``on_weight`` hears the bytes of every tensor taken (progress, ledger)."""

    weights: WeightSource
    mesh: Mesh
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    on_weight: Callable[[str, int], None]

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor called ``name`` in the build's dtype and device; raises ModelFileError when it is missing or has another shape."""
        found = self.weights.shapes().get(name)
        if found is None:
            raise ModelFileError(f"the checkpoint has no tensor {name}; expected one of shape {list(shape)}")
        if found != shape:
            raise ModelFileError(f"tensor {name} has shape {list(found)}, the config asks for {list(shape)}")
        tensor = self.weights.get(name, self.dtype).to(self.device)
        self.on_weight(name, tensor.numel() * tensor.element_size())
        return tensor


class NoWeights:
    """A checkpoint without tensors, for builds that make their own."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        raise ModelFileError(f"there is no tensor {name}: this build has no checkpoint")


class DummyBuild(Build):
    """Gives random weights in whatever shape is asked for, made on the device: measurements without a checkpoint."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        if len(shape) == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02)
        self.on_weight(name, tensor.numel() * tensor.element_size())
        return tensor
