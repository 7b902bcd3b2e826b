"""Weights of a Hugging Face directory: one model.safetensors, or shards named by an index."""

import re
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kilat.base.errors import ModelFileError
from kilat.load.files import read_json
from kilat.load.safetensors_header import Entry, read_header
from kilat.quant.fp8_blocks import BLOCK, SCALE_SUFFIX, Fp8Weight, dequantize
from kilat.quant.gguf_blocks import BlockWeight

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
MAX_SHARDS: Final = 4096
# A shard is a file of this directory, never a path.
_SHARD_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,240}\.safetensors", re.ASCII)
_FLOATS: Final = ("F32", "F16", "BF16")
_FP8: Final = "F8_E4M3"


class SafetensorsWeights:
    """:class:`kilat.load.weights.Weights` over the safetensors files of a directory.

    Every header is checked here before the library maps the file.
    """

    def __init__(self, directory: Path) -> None:
        self._shard_of, headers = _locate(directory)
        self._entries: dict[str, Entry] = {name: headers[s][name] for name, s in self._shard_of.items()}
        self._shapes = {name: entry.shape for name, entry in self._entries.items()}
        self.total_bytes = sum(entry.end - entry.begin for entry in self._entries.values())
        self._open: dict[str, Any] = {}
        try:
            for shard in headers:
                self._open[shard] = safe_open(directory / shard, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{shard} cannot be opened: {error}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        blocks = self.get_fp8(name)
        if blocks is not None:
            return dequantize(blocks, dtype)
        entry = self._entry(name)
        if entry.dtype not in _FLOATS:
            raise ModelFileError(
                f"tensor {name} is stored as {entry.dtype}; supported: {', '.join(_FLOATS)}, {_FP8} with {SCALE_SUFFIX} beside it. Use "
                "an unquantized checkpoint or a GGUF file"
            )
        return self._read(name).to(dtype, copy=True, memory_format=torch.contiguous_format)

    def get_fp8(self, name: str) -> Fp8Weight | None:
        entry, scale = self._entry(name), self._entries.get(name + SCALE_SUFFIX)
        if entry.dtype != _FP8 or scale is None:
            return None
        if len(entry.shape) != 2 or scale.shape != tuple(-(-n // BLOCK) for n in entry.shape):
            raise ModelFileError(
                f"tensor {name} of {list(entry.shape)} has scales of {list(scale.shape)}, expected one for each block of {BLOCK} x {BLOCK}"
            )
        if scale.dtype not in _FLOATS:
            raise ModelFileError(
                f"tensor {name}{SCALE_SUFFIX} is stored as {scale.dtype}; supported: {', '.join(_FLOATS)}"
            )
        scales = self._read(name + SCALE_SUFFIX).to(torch.float32, copy=True)
        return Fp8Weight(self._read(name).clone(memory_format=torch.contiguous_format), scales)

    def get_blocks(self, name: str) -> BlockWeight | None:
        return None

    def _entry(self, name: str) -> Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise ModelFileError(f"the checkpoint has no tensor {name}")
        return entry

    def _read(self, name: str) -> Tensor:
        """The tensor as stored, which may lie in the mapped file."""
        shard = self._shard_of[name]
        try:
            stored: Tensor = self._open[shard].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"tensor {name} of {shard} cannot be read: {error}") from error
        return stored

    def close(self) -> None:
        # The library unmaps a file when its handle is gone.
        self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _locate(directory: Path) -> tuple[dict[str, str], dict[str, dict[str, Entry]]]:
    """(tensor name -> shard name, shard name -> its header)."""
    if (directory / SINGLE).is_file():
        entries = read_header(directory / SINGLE)
        return dict.fromkeys(entries, SINGLE), {SINGLE: entries}
    if not (directory / INDEX).is_file():
        raise ModelFileError(
            f"the model directory has neither {SINGLE} nor {INDEX}: weights in other formats (.bin, .pt) can run code when they "
            "are read and are not loaded, convert them to safetensors"
        )
    shard_of = _read_index(directory / INDEX)
    headers = {}
    for shard in sorted(set(shard_of.values())):
        if not (directory / shard).is_file():
            raise ModelFileError(f"{INDEX} names {shard}, which is not there: the download is incomplete")
        headers[shard] = read_header(directory / shard)
    for name, shard in shard_of.items():
        if name not in headers[shard]:
            raise ModelFileError(f"{INDEX} places tensor {name[:200]!r} in {shard}, which has no such tensor")
    return shard_of, headers


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{path.name} has no weight_map: the file is damaged")
    shard_of: dict[str, str] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise ModelFileError(
                f"{path.name} places tensor {name[:200]!r} in {str(shard)[:200]!r}, which is not the name of a safetensors file"
            )
        shard_of[name] = shard
    if len(set(shard_of.values())) > MAX_SHARDS:
        raise ModelFileError(f"{path.name} names {len(set(shard_of.values()))} files, limit {MAX_SHARDS}")
    return shard_of
