"""Scales of FP8 pages: from the checkpoint, or measured once before the engine serves. Fixed from then on, and part of every page's name."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch

from kilat.base.errors import ConfigError, ModelFileError
from kilat.load.weights import Weights
from kilat.nn.decoder import Decoder, DecoderConfig
from kilat.ops.batch import StepBatch
from kilat.ops.fp8_linear import FP8_MAX
from kilat.ops.kernels import Kernels
from kilat.ops.rope_write import KvScale
from kilat.ops.sample import uniforms
from kilat.parallel.mesh import Mesh

MEASURED_TOKENS = 256
HEADROOM = 4.0
"""Measured magnitudes may grow by this before they clip. On two models real text reached 2.2 times what the measured tokens do; e4m3 is a
floating format, so room at the top costs no precision."""


def require_fp8_kv(kernels: Kernels, decoder: DecoderConfig) -> None:
    """Raises ConfigError where FP8 pages cannot be computed or would spoil the answers."""
    if not kernels.fp8_kv:
        raise ConfigError(
            f"kv_dtype is fp8, which the kernel set {kernels.name} cannot read; use --device cuda, --kernels reference or kv_dtype auto"
        )
    if any(a.qkv_bias and a.qk_norm_eps is None for a in decoder.attention):
        raise ConfigError(
            "kv_dtype is fp8, but this model adds a bias to its keys: a few elements of K are then so large that their rounding moves the "
            "attention (Qwen2.5-Coder-0.5B: |K| up to 215, KL from bf16 0.028 on average and 13.5 at worst; SmolLM2: 20, 0.008, 0.3); "
            "use kv_dtype auto"
        )


def stored_scales(
    weights: Weights, decoder: DecoderConfig, mesh: Mesh, device: torch.device
) -> list[KvScale] | None:
    """Scales that a checkpoint brings for all layers, one a tensor or one a head, of this rank's heads; None when it has none.

    Raises ModelFileError for some of them or numbers that cannot be.
    """
    sides = [
        _stored(weights, f"model.layers.{i}.self_attn", side, a.n_kv)
        for i, a in enumerate(decoder.attention)
        for side in "kv"
    ]
    found = [s for s in sides if s is not None]
    if found and len(found) < len(sides):
        raise ModelFileError(
            f"the checkpoint has {len(found)} of {len(sides)} scales, of K and V of every layer: use kv_dtype auto"
        )
    heads = mesh.slice(decoder.attention[0].n_kv, "key/value heads")
    mine = [s[heads].contiguous().to(device) for s in found]
    return [KvScale(k, v) for k, v in zip(mine[::2], mine[1::2])] or None


def _stored(weights: Weights, prefix: str, side: str, n_kv: int) -> torch.Tensor | None:
    names = (f"{prefix}.{side}_scale", f"{prefix}.{side}_proj.{side}_scale")
    name = next((n for n in names if n in weights.shapes()), None)
    if name is None:
        return None
    scale = weights.get(name, torch.float32).flatten()
    if scale.numel() not in (1, n_kv) or not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise ModelFileError(
            f"tensor {name} holds {scale.tolist()[:8]}, expected 1 or {n_kv} finite numbers above 0"
        )
    return scale.expand(n_kv)


@torch.inference_mode()
def measured_scales(model: Decoder, page_tokens: int) -> list[KvScale]:
    """Scales a head from one pass of ``model`` over fixed pseudo-random ids, with a few pages in the model's dtype.

    They are powers of two, so that small differences between machines do not give pages other names. Raises ModelFileError when the
    model gives numbers that are not finite.
    """
    c, device = model.config, model.embedding.device
    n, heads = min(MEASURED_TOKENS, model.cos_sin.shape[0]), model.layers[0].attention.heads
    shape = (-(-n // page_tokens), len(c.attention), 2, page_tokens, heads.n_kv, heads.dim)
    kv = torch.zeros(shape, dtype=model.embedding.dtype, device=device)
    model(_one_row(n, c.vocab_size, page_tokens, device), kv)
    top = kv.float().abs().amax(dim=(0, 3, 5)).cpu()  # [layers, 2, Hkv]
    if not bool(torch.isfinite(top).all()):
        raise ModelFileError(
            "the model's keys or values are not finite numbers: its weights are damaged or fit another config"
        )
    exponent = torch.ceil(torch.log2(top.clamp_min(2.0**-60) * (HEADROOM / FP8_MAX)))
    scale = torch.where(top > 0, torch.exp2(exponent), 1.0).to(device)
    return [KvScale(k.contiguous(), v.contiguous()) for k, v in scale]


def _one_row(n: int, vocab_size: int, page_tokens: int, device: torch.device) -> StepBatch:
    """The first pass of one session of ``n`` tokens, in pages 0, 1, 2 ..., so that a token's slot is its position."""
    positions = np.arange(n)
    ids = (uniforms(np.zeros(n, np.int64), positions) * vocab_size).astype(np.int64)

    def on_device(values: Sequence[int] | np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return StepBatch(
        token_ids=on_device(ids),
        positions=on_device(positions),
        row_start=on_device([0, n]),
        kv_len=on_device([n]),
        page_table=on_device(np.arange(-(-n // page_tokens)))[None],
        slots=on_device(positions),
        logits_at=on_device([n - 1]),
        page_tokens=page_tokens,
        max_kv_len=n,
        max_q_len=n,
    )


def scales_name(scales: Sequence[KvScale]) -> str:
    """A word that two engines share when their FP8 pages mean the same numbers."""
    digest = blake2b(digest_size=8)
    for s in scales:
        digest.update(torch.cat((s.k, s.v)).cpu().numpy().astype("<f4").tobytes())
    return f"fp8-{digest.hexdigest()}"
