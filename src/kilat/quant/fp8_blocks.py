"""FP8 block weights in checkpoints: what a config says of them, and cutting and stacking them along the edges of blocks."""

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from kilat.base.errors import ConfigError
from kilat.ops.fp8_linear import BLOCK, Fp8Weight, dequantize

__all__ = [
    "BLOCK",
    "SCALE_SUFFIX",
    "Fp8Weight",
    "checkpoint_quant",
    "cut_columns",
    "dequantize",
    "keeps_blocks",
    "stack_rows",
]

SCALE_SUFFIX: Final = "_scale_inv"
"""A checkpoint keeps the scales of tensor ``x.weight`` as ``x.weight_scale_inv``; in spite of the name they multiply."""
# which modules are quantized is seen from what is stored
_FREE: Final = ("modules_to_not_convert", "ignored_layers")


def checkpoint_quant(config: Mapping[str, object]) -> str:
    """How a checkpoint with this config stores its linear weights: ``none`` or ``fp8``; raises ConfigError for any other way."""
    found = config.get("quantization_config")
    if found is None:
        return "none"
    if not isinstance(found, Mapping):
        raise ConfigError(f"config.json: quantization_config is {found!r}, expected an object")
    _require(found, "quant_method", "fp8")
    _require(found, "weight_block_size", [BLOCK, BLOCK])
    _require(found, "fmt", "e4m3", absent="e4m3")
    _require(found, "activation_scheme", "dynamic", absent="dynamic")
    known = {"quant_method", "weight_block_size", "fmt", "activation_scheme", *_FREE}
    unknown = [key for key, value in found.items() if key not in known and value not in (None, False)]
    if unknown:
        raise ConfigError(
            f"quantization_config has {', '.join(sorted(unknown))}, which this version does not know; use an unquantized checkpoint"
        )
    return "fp8"


def _require(found: Mapping[str, object], key: str, wanted: object, absent: object = None) -> None:
    value = found.get(key, absent)
    if value != wanted:
        raise ConfigError(
            f"quantization_config has {key} {value!r}, supported: {wanted!r} (FP8 blocks of {BLOCK} x {BLOCK}); use the unquantized "
            "checkpoint (--quant fp8 quantizes it while loading) or a GGUF file"
        )


def keeps_blocks(shares: Sequence[slice]) -> bool:
    """Whether these ranges, one of each weight, can be cut out and stacked in order so that every block stays as it is."""
    starts = all(share.start % BLOCK == 0 for share in shares)
    return starts and all((share.stop - share.start) % BLOCK == 0 for share in shares[:-1])


def stack_rows(weights: Sequence[Fp8Weight], shares: Sequence[slice]) -> Fp8Weight:
    """Outputs ``shares[i]`` of ``weights[i]`` one below the other, with their numbers and scales; the shares must keep blocks."""
    data = torch.cat([w.data[share] for w, share in zip(weights, shares)])
    return Fp8Weight(data, torch.cat([w.scale[_blocks(share)] for w, share in zip(weights, shares)]))


def cut_columns(w: Fp8Weight, share: slice) -> Fp8Weight:
    """Inputs ``share`` of ``w`` with their numbers and scales; the share must keep blocks."""
    return Fp8Weight(w.data[:, share].contiguous(), w.scale[:, _blocks(share)].contiguous())


def _blocks(share: slice) -> slice:
    return slice(share.start // BLOCK, -(-share.stop // BLOCK))
