"""Weights of a GGUF file. Data is read piece by piece, so memory beside the result stays at a few MB."""

import os
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch
from torch import Tensor

from kilat.base import gguf_header
from kilat.base.errors import ModelFileError
from kilat.base.gguf_header import GGML_TYPES, TensorInfo
from kilat.load.gguf_config import config_of
from kilat.load.gguf_names import hf_name, rotary_heads
from kilat.quant.fp8_blocks import Fp8Weight
from kilat.quant.gguf_blocks import BlockWeight, dequantize_into, require_supported

_READ_BYTES: Final = 4 << 20


class GgufWeights:
    """:class:`kilat.load.weights.Weights` over one GGUF file.

    Reads with ``preadv`` and not through a mapping: a file that is cut while mapped would kill the process.
    """

    def __init__(self, path: Path) -> None:
        header = gguf_header.read(path)
        config = config_of(header, path)
        self.file_name = path.name
        self.data_offset = header.data_offset
        self.total_bytes = sum(info.n_bytes for info in header.tensors.values())
        self._infos: dict[str, TensorInfo] = {}
        self._heads: dict[str, int] = {}
        n_heads, n_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        assert isinstance(n_heads, int) and isinstance(n_kv_heads, int)
        for info in header.tensors.values():
            name = hf_name(info.name)
            if name is None:
                raise ModelFileError(
                    f"{path.name}: tensor {info.name!r} has no place in a {config['model_type']} model; "
                    "use another conversion of the model"
                )
            require_supported(info.ggml_type, info.name)
            heads = rotary_heads(info.name, str(config["model_type"]), n_heads, n_kv_heads)
            if heads and info.shape[0] % (2 * heads):
                raise ModelFileError(
                    f"{path.name}: {info.name} has {info.shape[0]} rows, which {heads} heads cannot share evenly in pairs"
                )
            self._infos[name], self._heads[name] = info, heads
        self._shapes = {name: info.shape for name, info in self._infos.items()}
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by close)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        info = self._info(name)
        flat = torch.empty(info.n_bytes // _block_bytes(info) * _block_items(info), dtype=dtype)
        self._read_into(flat, info)
        return self._in_order(flat, name).view(info.shape)

    def get_fp8(self, name: str) -> Fp8Weight | None:
        return None

    def get_blocks(self, name: str) -> BlockWeight | None:
        info = self._info(name)
        if len(info.shape) != 2 or _block_items(info) == 1:
            return None
        data = torch.empty(info.n_bytes, dtype=torch.uint8)
        begin, what = self.data_offset + info.offset, f"{self.file_name}: tensor {info.name!r}"
        _read_exactly(self._file.fileno(), data.numpy().data, begin, what)
        n_out, n_in = info.shape
        return BlockWeight(self._in_order(data, name).view(n_out, -1), info.ggml_type, (n_out, n_in))

    def _info(self, name: str) -> TensorInfo:
        info = self._infos.get(name)
        if info is None:
            raise ModelFileError(f"{self.file_name} has no tensor for {name}")
        return info

    def _in_order(self, flat: Tensor, name: str) -> Tensor:
        """Rows of values or of blocks as the models want them: the file has the two halves of a head that rotates interleaved."""
        heads = self._heads[name]
        if not heads:
            return flat
        half = self._infos[name].shape[0] // heads // 2
        return flat.view(heads, half, 2, -1).transpose(1, 2).contiguous()

    def _read_into(self, flat: Tensor, info: TensorInfo) -> None:
        n_blocks = info.n_bytes // _block_bytes(info)
        step = _READ_BYTES // _block_bytes(info)
        buffer = memoryview(bytearray(min(n_blocks, step) * _block_bytes(info)))
        for first in range(0, n_blocks, step):
            count = min(step, n_blocks - first)
            raw = buffer[: count * _block_bytes(info)]
            begin = self.data_offset + info.offset + first * _block_bytes(info)
            _read_exactly(self._file.fileno(), raw, begin, f"{self.file_name}: tensor {info.name!r}")
            values = flat[first * _block_items(info) : (first + count) * _block_items(info)]
            dequantize_into(values, raw, info.ggml_type)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _block_bytes(info: TensorInfo) -> int:
    return GGML_TYPES[info.ggml_type].block_bytes


def _block_items(info: TensorInfo) -> int:
    return GGML_TYPES[info.ggml_type].block_items


def _read_exactly(descriptor: int, buffer: memoryview, begin: int, what: str) -> None:
    done = 0
    while done < len(buffer):
        try:
            n_bytes = os.preadv(descriptor, [buffer[done:]], begin + done)
        except OSError as error:
            raise ModelFileError(f"{what} cannot be read: {error.strerror or error}") from error
        if n_bytes == 0:
            raise ModelFileError(
                f"{what} ends {len(buffer) - done} bytes early: the file changed while it was open"
            )
        done += n_bytes
