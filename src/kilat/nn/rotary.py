"""Rotary position tables, with the frequency scalings that checkpoints ask for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kilat.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of the first ``dim`` elements of a head at base ``theta``.

    ``scaling`` holds the checkpoint's scaling parameters with key ``type``; ``max_positions`` is the context of the unscaled model.
    """

    dim: int
    theta: float
    max_positions: int
    scaling: Mapping[str, object]


def cos_sin_table(rope: Rope, n_positions: int, device: torch.device) -> Tensor:
    """[n_positions, dim] fp32: dim / 2 cosines, then dim / 2 sines (arXiv:2104.09864). Frequencies and angles are fp32 products, as
    in transformers: at long contexts the rounding of the angle is part of what a model was trained with. The functions of them are
    computed in fp64 and rounded once, so that the native runtime has the same bits without torch."""
    frequency, factor = inverse_frequencies(rope)
    angle = (torch.arange(n_positions, dtype=torch.float32)[:, None] * frequency[None, :]).double()
    return (torch.cat((angle.cos().float(), angle.sin().float()), dim=-1) * factor).to(device)


def inverse_frequencies(rope: Rope) -> tuple[Tensor, float]:
    """(frequencies [dim / 2] fp32, factor on cos and sin). Raises ConfigError for a scaling type that is not known."""
    exponent = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    plain = 1.0 / torch.tensor(rope.theta).double().pow(exponent.double()).float()
    kind = rope.scaling.get("type", "default")
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / _number(rope, "factor"), 1.0
    if kind == "llama3":
        return _llama3(rope, plain), 1.0
    if kind == "yarn":
        return _yarn(rope, plain)
    raise ConfigError(
        f"rope scaling type {kind!r} is not supported; supported: default, linear, llama3, yarn"
    )


def _number(rope: Rope, key: str, default: float | None = None) -> float:
    value = rope.scaling.get(key, default)
    if not isinstance(value, int | float):
        raise ConfigError(f"rope scaling {rope.scaling.get('type')!r} needs a number {key!r}, got {value!r}")
    return float(value)


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, a smooth ramp between (Llama 3.1 model card)."""
    factor = _number(rope, "factor")
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    context = _number(rope, "original_max_position_embeddings")
    wavelength = 2 * math.pi / plain
    ramp = ((context / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - ramp) * plain / factor + ramp * plain


def _yarn(rope: Rope, plain: Tensor) -> tuple[Tensor, float]:
    """YaRN (arXiv:2309.00071): interpolate slow dimensions, keep fast ones, temper attention by the factor on cos and sin."""
    factor = _number(rope, "factor")
    context = _number(rope, "original_max_position_embeddings", rope.max_positions)
    beta_fast, beta_slow = _number(rope, "beta_fast", 32.0), _number(rope, "beta_slow", 1.0)
    attention_factor = _number(rope, "attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)

    def dimension_of(rotations: float) -> float:
        return rope.dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension_of(beta_fast)), 0)
    high = min(math.ceil(dimension_of(beta_slow)), rope.dim - 1)
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return plain / factor * ramp + plain * (1 - ramp), attention_factor
