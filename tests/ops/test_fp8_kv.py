"""FP8 pages in the reference: what is stored, what attention makes of it, and that rows and chunks stay apart."""

import pytest
import torch

from kilat.ops import kernels
from kilat.ops.fp8_linear import FP8, FP8_MAX
from kilat.ops.rope_write import Heads, KvScale
from tests.ops.cpu.cases import Shape, different_bits, normal, part, step

pytestmark = pytest.mark.cpu
ops = kernels.reference()
SHAPE = Shape(n_q=6, n_kv=2, dim=24, page_tokens=8)
HEADS = Heads(SHAPE.n_q, SHAPE.n_kv, SHAPE.dim)
WIDTH = (SHAPE.n_q + 2 * SHAPE.n_kv) * SHAPE.dim


def scales() -> KvScale:
    return KvScale(torch.tensor([0.01, 0.5]), torch.tensor([0.125, 0.003]))


def table(n: int) -> torch.Tensor:
    angle = torch.arange(n)[:, None] / torch.logspace(0, 3, SHAPE.dim // 2)
    return torch.cat((angle.cos(), angle.sin()), -1)


def fp8_pool(batch) -> torch.Tensor:
    shape = (int(batch.page_table.max()) + 2, 2, SHAPE.page_tokens, SHAPE.n_kv, SHAPE.dim)
    return torch.full(shape, torch.nan).to(FP8)


def written(kv: torch.Tensor, batch) -> tuple[torch.Tensor, torch.Tensor]:
    slots = batch.slots.long()
    page, offset = slots // batch.page_tokens, slots % batch.page_tokens
    return kv.float()[page, 0, offset], kv.float()[page, 1, offset]


def test_pages_hold_k_and_v_over_the_scale_of_their_head():
    batch = step([20, 3], [20, 40], SHAPE)
    qkv = normal(1, 23, WIDTH, dtype=torch.bfloat16)
    plain, packed = fp8_pool(batch).bfloat16(), fp8_pool(batch)
    q = ops.rope_write(qkv, table(64), plain, batch, HEADS)
    assert torch.equal(ops.rope_write(qkv, table(64), packed, batch, HEADS, kv_scale=scales()), q)
    for got, exact, scale in zip(written(packed, batch), written(plain, batch), (scales().k, scales().v)):
        value = exact.double() / scale.double()[:, None]
        clipped = value.clamp(-FP8_MAX, FP8_MAX)
        step_size = torch.maximum(clipped.abs() / 16, torch.tensor(2.0**-10))
        assert ((got.double() - clipped).abs() <= step_size * (1 + 1e-6)).all()
    # the small scales make some of the values too large
    assert (written(packed, batch)[1][:, 1].abs() == FP8_MAX).any()


def test_what_was_not_written_stays():
    batch = step([5], [5], SHAPE)
    kv = fp8_pool(batch)
    ops.rope_write(normal(2, 5, WIDTH, dtype=torch.float32), table(8), kv, batch, HEADS, kv_scale=scales())
    assert int(torch.isfinite(kv.float()).sum()) == 5 * 2 * SHAPE.n_kv * SHAPE.dim


def test_nan_in_a_token_is_stored_as_nan_and_reaches_no_other_row():
    batch = step([9, 4], [9, 4], SHAPE)
    qkv = normal(3, 13, WIDTH, dtype=torch.float32)
    qkv[4] = torch.nan
    kv = fp8_pool(batch)
    q = ops.rope_write(qkv, table(16), kv, batch, HEADS, kv_scale=scales())
    y = ops.attention(q, kv, batch, scale=0.2, kv_scale=scales())
    assert torch.isnan(y[4:9]).all() and torch.isfinite(y[9:]).all()


@pytest.mark.parametrize("window", [0, 11])
def test_attention_is_that_of_the_stored_values_times_their_scales(window):
    batch = step([1, 30, 4], [70, 30, 129], SHAPE)
    kv = fp8_pool(batch).float()
    kv = torch.randn(kv.shape, generator=torch.Generator().manual_seed(4)).mul(40).to(FP8)
    q = normal(5, 35, SHAPE.n_q, SHAPE.dim, dtype=torch.float32)
    s = scales()
    values = kv.float() * torch.stack((s.k, s.v))[None, :, None, :, None]
    expected = ops.attention(q, values, batch, scale=0.2, window=window)
    got = ops.attention(q, kv, batch, scale=0.2, window=window, kv_scale=s)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_chunk_of_a_prompt_has_the_bits_of_the_whole():
    batch = step([40], [200], SHAPE)
    kv = torch.randn(fp8_pool(batch).shape, generator=torch.Generator().manual_seed(6)).mul(30).to(FP8)
    q = normal(7, 40, SHAPE.n_q, SHAPE.dim, dtype=torch.bfloat16)
    whole = ops.attention(q, kv, batch, scale=0.2, kv_scale=scales())
    for first, n in ((0, 1), (1, 22), (23, 17)):
        got = ops.attention(q[first : first + n], kv, part(batch, 0, first, n), scale=0.2, kv_scale=scales())
        assert not different_bits(got, whole[first : first + n], 7)
