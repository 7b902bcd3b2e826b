"""rope_write: per-head norm of q and k (where the model has it), rotary embedding, and the write of K and V into their pages."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kilat.ops.batch import StepBatch
from kilat.ops.fp8_linear import FP8, FP8_MAX


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of one attention layer on this rank: ``n_q`` query heads share ``n_kv`` key/value heads of ``dim`` elements."""

    n_q: int
    n_kv: int
    dim: int


@dataclass(frozen=True, slots=True)
class QkNorm:
    """Weights [D] of the RMS norms that Qwen3 puts on every query and key head before the rotation."""

    q: Tensor
    k: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class KvScale:
    """Scales ``k`` and ``v`` [Hkv] fp32, above 0, of a layer whose pages are e4m3: value = stored number * scale of its head. They never
    change while the pool lives, else pages of one content would hold different bits."""

    k: Tensor
    v: Tensor


def rope_write(
    qkv: Tensor,
    cos_sin: Tensor,
    kv: Tensor,
    batch: StepBatch,
    heads: Heads,
    norm: QkNorm | None = None,
    kv_scale: KvScale | None = None,
) -> Tensor:
    """qkv [T, (Hq + 2 Hkv) D] (q, then k, then v) -> rotated q [T, Hq, D], same dtype; writes K and V of the T tokens into ``kv``.

    cos_sin [max positions, R] fp32: R/2 cosines then R/2 sines, for the first R <= D elements of each head (the rest pass through);
    pairs are (i, i + R/2), the "rotate half" form of Hugging Face checkpoints. The rotation is computed in fp32 and rounded once.
    kv: one layer's view [pages, 2, page_tokens, Hkv, D] of the pool, any strides with unit stride in D; index 0 is K, 1 is V.
    With ``kv_scale`` the pool is e4m3: K and V, rounded to qkv's dtype first, are divided by the scale of their head in fp32 and rounded to
    nearest even; what is beyond +-448 is stored as +-448, a NaN as NaN.
    ``heads.n_q`` may be 0: qkv is K and V alone. So may ``heads.n_kv``: qkv is q alone, and ``kv`` stays as it is.
    """
    n_tokens = qkv.shape[0]
    q, k, v = qkv.split([heads.n_q * heads.dim, heads.n_kv * heads.dim, heads.n_kv * heads.dim], dim=-1)
    q = q.view(n_tokens, heads.n_q, heads.dim)
    k = k.view(n_tokens, heads.n_kv, heads.dim)
    v = v.view(n_tokens, heads.n_kv, heads.dim)
    if norm is not None:
        q, k = _head_norm(q, norm.q, norm.eps), _head_norm(k, norm.k, norm.eps)
    table = cos_sin[batch.positions.long()]
    q, k = _rotate(q, table), _rotate(k, table)
    if heads.n_kv == 0:
        return q
    slots = batch.slots.long()
    page, offset = slots // batch.page_tokens, slots % batch.page_tokens
    if kv_scale is not None:
        k, v = _to_fp8(k, kv_scale.k), _to_fp8(v, kv_scale.v)
    kv[page, 0, offset] = k
    kv[page, 1, offset] = v
    return q


def _to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """x [T, Hkv, D], scale [Hkv] -> e4m3 [T, Hkv, D]."""
    return (x.float() / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    f = x.float()
    f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
    return f.to(x.dtype) * weight


def _rotate(x: Tensor, table: Tensor) -> Tensor:
    half = table.shape[-1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    f = x.float()
    a, b = f[..., :half], f[..., half : 2 * half]
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin, f[..., 2 * half :]), dim=-1)
    return turned.to(x.dtype)
