"""rope_write: head norm, rotation and page write in one pass over the QKV product; one program per token and group of heads."""

import triton
import triton.language as tl
from torch import Tensor

from kilat.ops.batch import StepBatch
from kilat.ops.rope_write import Heads, KvScale, QkNorm
from kilat.ops.triton.launch import can_overlap, let_next_start, wait_for_previous

HEADS_PER_PROGRAM = 8


def rope_write(
    qkv: Tensor,
    cos_sin: Tensor,
    kv: Tensor,
    batch: StepBatch,
    heads: Heads,
    norm: QkNorm | None = None,
    kv_scale: KvScale | None = None,
) -> Tensor:
    """Contract: ops/rope_write.py. Batch-invariant: a head of a token is handled alone."""
    qkv = qkv.contiguous()
    n_tokens, dim, rotary = qkv.shape[0], heads.dim, cos_sin.shape[1]
    q = qkv.new_empty(n_tokens, heads.n_q, dim)
    if n_tokens == 0:
        return q
    rest = dim - rotary
    pdl = can_overlap()
    grid = (n_tokens, triton.cdiv(heads.n_q + 2 * heads.n_kv, HEADS_PER_PROGRAM))
    _rope_write[grid](
        qkv, q, kv, cos_sin, batch.positions, batch.slots,
        norm.q if norm else None, norm.k if norm else None, norm.eps if norm else 0.0,
        kv_scale.k if kv_scale else None, kv_scale.v if kv_scale else None,
        kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
        PAGE=batch.page_tokens, HQ=heads.n_q, HKV=heads.n_kv, D=dim, HALF=rotary // 2,
        HALF_PAD=triton.next_power_of_2(rotary // 2), REST=rest, REST_PAD=triton.next_power_of_2(max(rest, 1)),
        H=HEADS_PER_PROGRAM, PDL=pdl, num_warps=2, launch_pdl=pdl,
    )  # fmt: skip
    return q


@triton.jit
def _rope_write(
    qkv_ptr, q_ptr, kv_ptr, cos_sin_ptr, positions_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, eps,
    k_scale_ptr, v_scale_ptr, page_stride, kv_stride, token_stride, head_stride,
    PAGE: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    HALF_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr, H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * H + tl.arange(0, H)[:, None]
    low = tl.arange(0, HALF_PAD)[None, :]
    slot = tl.load(slots_ptr + token)
    table = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF)
    cos = tl.load(table + low, mask=low < HALF, other=0.0)
    sin = tl.load(table + HALF + low, mask=low < HALF, other=0.0)

    real = head < HQ + 2 * HKV
    is_q, is_v = head < HQ, head >= HQ + HKV
    # where a head goes: its row of q, or its place in the page (k and v heads are numbered within their kind)
    kv_head = tl.where(is_v, head - HQ - HKV, head - HQ).to(tl.int64)
    page = (slot // PAGE).to(tl.int64) * page_stride + (slot % PAGE).to(tl.int64) * token_stride
    place = page + is_v.to(tl.int64) * kv_stride + kv_head * head_stride
    source = qkv_ptr + (token * (HQ + 2 * HKV) + head) * D
    q_out = q_ptr + (token * HQ + head) * D

    in_half = real & (low < HALF)
    wait_for_previous(PDL)
    a = tl.load(source + low, mask=in_half, other=0.0)
    b = tl.load(source + HALF + low, mask=in_half, other=0.0)
    kind = a.dtype
    if REST > 0:
        far = tl.arange(0, REST_PAD)[None, :]
        in_rest = real & (far < REST)
        c = tl.load(source + 2 * HALF + far, mask=in_rest, other=0.0)
    if q_norm_ptr is not None:
        fa, fb = a.to(tl.float32), b.to(tl.float32)
        square = tl.sum(fa * fa + fb * fb, 1)
        if REST > 0:
            square += tl.sum(c.to(tl.float32) * c.to(tl.float32), 1)
        factor = tl.rsqrt(square / D + eps)[:, None]
        wa, wb = (
            _norm_weight(q_norm_ptr, k_norm_ptr, is_q, low, HALF),
            _norm_weight(q_norm_ptr + HALF, k_norm_ptr + HALF, is_q, low, HALF),
        )
        a = tl.where(is_v, a, ((fa * factor).to(kind).to(tl.float32) * wa).to(kind))
        b = tl.where(is_v, b, ((fb * factor).to(kind).to(tl.float32) * wb).to(kind))
        if REST > 0:
            wc = _norm_weight(q_norm_ptr + 2 * HALF, k_norm_ptr + 2 * HALF, is_q, far, REST)
            c = tl.where(is_v, c, ((c.to(tl.float32) * factor).to(kind).to(tl.float32) * wc).to(kind))
    fa, fb = a.to(tl.float32), b.to(tl.float32)
    ya = tl.where(is_v, a, (fa * cos - fb * sin).to(kind))
    yb = tl.where(is_v, b, (fb * cos + fa * sin).to(kind))
    to_kv = real & (head >= HQ)
    tl.store(q_out + low, ya, mask=in_half & is_q)
    tl.store(q_out + HALF + low, yb, mask=in_half & is_q)
    scale = head.to(tl.float32) * 0 + 1.0
    if k_scale_ptr is not None:
        k_scale = tl.load(k_scale_ptr + kv_head, mask=to_kv & (is_v == 0), other=1.0)
        scale = k_scale * tl.load(v_scale_ptr + kv_head, mask=to_kv & is_v, other=1.0)
    tl.store(kv_ptr + place + low, _stored(ya, scale, kv_ptr), mask=in_half & to_kv)
    tl.store(kv_ptr + place + HALF + low, _stored(yb, scale, kv_ptr), mask=in_half & to_kv)
    if REST > 0:
        tl.store(q_out + 2 * HALF + far, c, mask=in_rest & is_q)
        tl.store(kv_ptr + place + 2 * HALF + far, _stored(c, scale, kv_ptr), mask=in_rest & to_kv)


@triton.jit
def _stored(y, scale, kv_ptr):
    """What a page keeps of y: itself, or the nearest e4m3 number to y / scale, at most 448; NaN stays NaN."""
    if kv_ptr.dtype.element_ty == tl.float8e4nv:
        f = y.to(tl.float32)
        f = tl.math.div_rn(f, scale + tl.zeros_like(f))
        return tl.where(f > 448.0, 448.0, tl.where(f < -448.0, -448.0, f)).to(tl.float8e4nv)
    else:
        return y


@triton.jit
def _norm_weight(q_norm_ptr, k_norm_ptr, is_q, at, n):
    """The norm weights of each head of the tile, [H, columns] fp32: q's for query heads, else k's."""
    wq = tl.load(q_norm_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    wk = tl.load(k_norm_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    return tl.where(is_q, wq, wk)
