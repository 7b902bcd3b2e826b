"""Weights of a model by their Hugging Face names, whatever the files are."""

from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from kilat.load.files import ModelFiles
from kilat.load.gguf_weights import GgufWeights
from kilat.load.safetensors_weights import SafetensorsWeights
from kilat.quant.fp8_blocks import Fp8Weight
from kilat.quant.gguf_blocks import BlockWeight


class Weights(Protocol):
    """Open weight files. ``total_bytes`` is what all tensors take as stored. Not to be changed while open."""

    total_bytes: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by Hugging Face name; the caller must not change it."""
        ...

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        """A new contiguous CPU tensor owned by the caller; raises ModelFileError (missing, damaged, format not supported)."""
        ...

    def get_fp8(self, name: str) -> Fp8Weight | None:
        """The weight as it is stored, when that is in FP8 blocks; new CPU tensors owned by the caller. Raises as :meth:`get`."""
        ...

    def get_blocks(self, name: str) -> BlockWeight | None:
        """A matrix as a GGUF file stores it, owned by the caller; None when it is not stored in blocks. Raises as :meth:`get`."""
        ...

    def close(self) -> None:
        """Let go of the files; tensors taken before stay valid."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_weights(files: ModelFiles) -> Weights:
    """Open the weights of ``files`` and check every header; raises ModelFileError. No tensor data is read yet."""
    if files.kind == "gguf":
        return GgufWeights(files.path)
    return SafetensorsWeights(files.path)
