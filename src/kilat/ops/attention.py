"""attention: causal attention of every row over its own pages; prefill chunks and decode rows in one call."""

import torch
from torch import Tensor

from kilat.ops.batch import StepBatch
from kilat.ops.rope_write import KvScale

QUERY_TILE = 16
KEY_TILE = 64


def attention(
    q: Tensor,
    kv: Tensor,
    batch: StepBatch,
    *,
    scale: float,
    window: int = 0,
    kv_scale: KvScale | None = None,
) -> Tensor:
    """q [T, Hq, D] -> [T, Hq * D], same dtype. The token at position p sees keys 0 .. p of its row (p - window + 1 .. p if window > 0).

    kv: one layer's view [pages, 2, page_tokens, Hkv, D] of the pool; Hq is a multiple of Hkv (grouped heads, arXiv:2305.13245).
    With ``kv_scale`` the pool is e4m3: scores are scale * k_scale * (q . stored K), the output is v_scale * (weights . stored V), both
    fp32 with the scale of the head, rounded once to q's dtype. q and the weights are not quantized.
    Softmax in fp32. Batch- and chunk-invariant: queries go in blocks of 16 (padded), keys in tiles of 64 counted from position 0
    with masked tails, one maximum pass, then a sum in order, so the shapes of all products are fixed.
    """
    n_kv = kv.shape[3]
    out = torch.empty_like(q)
    factors: tuple[float | Tensor, float | Tensor] = (scale, 1.0)
    if kv_scale is not None:
        factors = (scale * kv_scale.k[:, None, None], kv_scale.v[:, None, None])
    row_start, kv_len = batch.row_start.tolist(), batch.kv_len.tolist()
    for b, n in enumerate(kv_len):
        first, last = row_start[b], row_start[b + 1]
        n_pages = -(-n // batch.page_tokens)
        pages = batch.page_table[b, :n_pages].long()
        keys = kv[pages, 0].reshape(-1, n_kv, q.shape[2])[:n].float()
        values = kv[pages, 1].reshape(-1, n_kv, q.shape[2])[:n].float()
        for t in range(first, last, QUERY_TILE):
            block = q[t : min(t + QUERY_TILE, last)]
            start = n - (last - first) + (t - first)
            out[t : t + block.shape[0]] = _block(block, keys, values, start, factors, window)
    return out.view(q.shape[0], -1)


def _block(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    factors: tuple[float | Tensor, float | Tensor],
    window: int,
) -> Tensor:
    """Up to 16 queries [n, Hq, D] at positions start ... over keys, values [L, Hkv, D] fp32; ``factors`` go on scores and output."""
    scale, out_scale = factors
    n, n_q, dim = q.shape
    n_kv = keys.shape[1]
    group = n_q // n_kv
    # [Hkv, 16 * group, D]: the shape does not depend on how many queries the block really has
    padded = q.new_zeros(QUERY_TILE, n_q, dim, dtype=torch.float32)
    padded[:n] = q
    x = padded.view(QUERY_TILE, n_kv, group, dim).permute(1, 0, 2, 3).reshape(n_kv, QUERY_TILE * group, dim)
    position = torch.arange(start, start + QUERY_TILE, device=q.device).repeat_interleave(group)
    length = start + n
    scores = []
    for k0 in range(0, length, KEY_TILE):
        tile = _tile(keys, k0)
        at = torch.arange(k0, k0 + KEY_TILE, device=q.device)
        hidden = at[None, :] > position[:, None]
        if window > 0:
            hidden |= at[None, :] <= position[:, None] - window
        scores.append((x @ tile.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf))
    top = torch.stack([s.amax(-1) for s in scores]).amax(0).unsqueeze(-1)
    top = top.masked_fill(top == -torch.inf, 0.0)
    total = torch.zeros_like(top)
    acc = torch.zeros_like(x)
    for i, s in enumerate(scores):
        p = torch.exp(s - top)
        total += p.sum(-1, keepdim=True)
        acc += p @ _tile(values, i * KEY_TILE)
    y = (acc / total * out_scale).view(n_kv, QUERY_TILE, group, dim)
    y = y.permute(1, 0, 2, 3).reshape(QUERY_TILE, n_q, dim)
    return y[:n].to(q.dtype)


def _tile(x: Tensor, first: int) -> Tensor:
    """Rows first .. first + 63 of x [L, Hkv, D] as [Hkv, 64, D], zeros past the end."""
    part = x[first : first + KEY_TILE]
    if part.shape[0] < KEY_TILE:
        full = x.new_zeros(KEY_TILE, x.shape[1], x.shape[2])
        full[: part.shape[0]] = part
        part = full
    return part.transpose(0, 1).contiguous()
