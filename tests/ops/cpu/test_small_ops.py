"""Norms, the gate and rope_write on the CPU against the torch reference, row by row the same bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.base.errors import EngineError
from kilat.ops.kernels import reference
from kilat.ops.rope_write import Heads, QkNorm
from kilat.ops.sample import Filter
from tests.ops.cpu.cases import SHAPES, Shape, amid_nan, differences, different_bits, normal, pool, step

pytestmark = pytest.mark.cpu

REFERENCE = reference()
DTYPES = (torch.float32, torch.bfloat16)
EPS = 1e-5


@settings(max_examples=20)
@given(rows=st.integers(1, 40), h=st.integers(1, 700), seed=st.integers(0, 2**20))
def test_norms_agree_with_reference_and_rows_are_alone(kernels, lone, rows, h, seed):
    for dtype in DTYPES:
        x, residual = normal(seed, rows, h, dtype=dtype), normal(seed + 1, rows, h, dtype=dtype)
        weight = normal(seed + 2, h, dtype=dtype)
        got = kernels.rms_norm(x, weight, EPS)
        assert not differences(got, REFERENCE.rms_norm(x, weight, EPS), seed)
        assert not different_bits(
            lone.rms_norm(amid_nan(x)[rows // 2 :], weight, EPS), got[rows // 2 :], seed
        )
        expected, sums = REFERENCE.add_rms_norm(x, residual, weight, EPS)
        got, kept = kernels.add_rms_norm(amid_nan(x), residual.clone(), weight, EPS)
        assert not different_bits(kept, sums, seed)
        assert not differences(got, expected, seed)
        again, _ = lone.add_rms_norm(x[-1:], residual[-1:].clone(), weight, EPS)
        assert not different_bits(again, got[-1:], seed)


def test_residual_is_updated_in_place(kernels, dtype):
    x, residual, weight = (
        normal(1, 3, 20, dtype=dtype),
        normal(2, 3, 20, dtype=dtype),
        normal(3, 20, dtype=dtype),
    )
    expected = x + residual
    _, kept = kernels.add_rms_norm(x, residual, weight, EPS)
    assert kept.data_ptr() == residual.data_ptr() and torch.equal(residual, expected)


@settings(max_examples=20)
@given(
    rows=st.integers(1, 40),
    n=st.integers(1, 700),
    scale=st.sampled_from([0.1, 3.0, 60.0]),
    seed=st.integers(0, 2**20),
)
def test_gate_agrees_with_reference_and_rows_are_alone(kernels, lone, rows, n, scale, seed):
    for dtype in DTYPES:
        x = normal(seed, rows, 2 * n, dtype=dtype, scale=scale)
        got = kernels.silu_mul(x)
        assert not differences(got, REFERENCE.silu_mul(x), seed)
        assert not different_bits(lone.silu_mul(amid_nan(x)[rows // 2 :]), got[rows // 2 :], seed)


@pytest.mark.parametrize("value", [-1e30, -1e4, -88.7, -1.3, -1e-30, 0.0, 0.7, 88.9, 1e4, 1e30])
def test_gate_gives_equal_bits_at_every_place_of_a_row_and_no_nan(kernels, dtype, value):
    n = 83
    x = torch.full((1, 2 * n), value, dtype=dtype)
    x[:, n:] = 1.0
    got = kernels.silu_mul(x)
    assert len(got.unique()) == 1
    assert not differences(got[:, :1], REFERENCE.silu_mul(x)[:, :1], 0)


@settings(max_examples=20)
@given(half=st.integers(1, 130), k=st.integers(1, 150), rows=st.integers(1, 90), seed=st.integers(0, 2**20))
def test_gated_linear_has_bits_of_gate_after_linear(kernels, lone, half, k, rows, seed):
    for dtype in DTYPES:
        for width in (
            half,
            -(-half // 32) * 32,
        ):  # the fused way wants whole panels, the other widths take two steps
            x, weight = normal(seed, rows, k, dtype=dtype), normal(seed + 1, 2 * width, k, dtype=dtype)
            packed = kernels.pack_linear(weight, None)
            expected = kernels.silu_mul(kernels.linear(x, packed))
            assert not different_bits(kernels.gated_linear(amid_nan(x), packed), expected, seed)
            assert not different_bits(lone.gated_linear(x[-1:], packed), expected[-1:], seed)


def test_gated_linear_adds_bias(kernels, dtype):
    x, weight, bias = (normal(i, *s, dtype=dtype) for i, s in enumerate([(3, 20), (128, 20), (128,)]))
    packed = kernels.pack_linear(weight, bias)
    expected = kernels.silu_mul(kernels.linear(x, packed))
    assert not different_bits(kernels.gated_linear(x, packed), expected, 0)


def test_gate_keeps_nan(kernels, dtype):
    x = torch.zeros(1, 40, dtype=dtype)
    x[0, 7] = torch.nan
    assert kernels.silu_mul(x).isnan().nonzero().tolist() == [[0, 7]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("turned", ["whole", "part"])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "qk-norm"])
def test_rope_write_agrees_with_reference_and_touches_its_slots_only(
    kernels, lone, dtype, shape, turned, normed
):
    batch = step([5, 1, 40, 1], [5, 33, 70, 1], shape)
    heads = Heads(shape.n_q, shape.n_kv, shape.dim)
    qkv = normal(1, 47, (shape.n_q + 2 * shape.n_kv) * shape.dim, dtype=dtype)
    rotary = shape.dim if turned == "whole" else shape.dim // 4 * 2
    table = torch.randn(80, rotary, generator=torch.Generator().manual_seed(2))
    norm = (
        QkNorm(normal(3, shape.dim, dtype=dtype), normal(4, shape.dim, dtype=dtype), 1e-6) if normed else None
    )
    expected_kv, kv, kv_lone = (pool(batch, shape, dtype, seed=5) for _ in range(3))
    expected = REFERENCE.rope_write(qkv, table, expected_kv, batch, heads, norm)
    got = kernels.rope_write(amid_nan(qkv), table, kv, batch, heads, norm)
    assert not differences(got, expected, 1)
    assert torch.equal(kv.isnan(), expected_kv.isnan())
    assert not differences(kv.nan_to_num(), expected_kv.nan_to_num(), 1)
    assert not different_bits(lone.rope_write(qkv, table, kv_lone, batch, heads, norm), got, 1)
    assert not different_bits(kv_lone, kv, 1)


def test_rope_write_refuses_what_does_not_fit(kernels):
    shape = Shape()
    batch, heads = step([1], [1], shape), Heads(6, 2, 64)
    kv = pool(batch, shape, torch.float32, 0)
    with pytest.raises(EngineError, match="width 600"):
        kernels.rope_write(torch.zeros(1, 600), torch.zeros(4, 64), kv, batch, heads)
    with pytest.raises(EngineError, match="bfloat16"):
        kernels.rope_write(torch.zeros(1, 640, dtype=torch.bfloat16), torch.zeros(4, 64), kv, batch, heads)


@settings(max_examples=40)
@given(
    rows=st.integers(1, 9),
    values=st.lists(st.integers(-6, 6), min_size=1, max_size=700),
    holes=st.sampled_from([None, -torch.inf]),
)
def test_greedy_takes_the_lowest_index_of_the_largest_value(kernels, rows, values, holes):
    for dtype in DTYPES:
        # few distinct values, both zeros among them, so that there are ties everywhere
        row = torch.tensor(values, dtype=dtype) * torch.where(torch.arange(len(values)) % 2 == 0, 1, -1).to(
            dtype
        )
        if holes is not None:
            row[::3] = holes
        x = torch.stack([row.roll(i) for i in range(rows)])
        ids, top = kernels.greedy(x)
        expected_ids, expected_top = REFERENCE.greedy(x)
        assert ids.tolist() == expected_ids.tolist()
        assert top.tolist() == expected_top.float().tolist()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("at", [0, 255, 256, 511, 599])
def test_greedy_shows_a_nan_wherever_it_is_and_of_either_sign(kernels, dtype, at, sign):
    x = normal(0, 3, 600, dtype=dtype)
    x[1, at] = torch.copysign(torch.tensor(torch.nan), torch.tensor(float(sign))).to(dtype)
    _, top = kernels.greedy(x)
    assert torch.isnan(top).tolist() == [False, True, False]


@settings(max_examples=60)
@given(
    values=st.lists(st.integers(-40, 40), min_size=1, max_size=900),
    temperature=st.sampled_from([0.25, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.05, 0.31, 0.77, 0.96, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.4]),
    seed=st.integers(-(2**63), 2**63 - 1),
    banned=st.booleans(),
)
def test_a_row_is_sampled_as_the_reference_samples_it(
    kernels, values, temperature, top_k, top_p, min_p, seed, banned
):
    # quarter steps make ties; odd filter values keep sums away from the thresholds
    logits = torch.tensor(values) / 4
    if banned:
        logits[1::2] = -torch.inf
    filters = [Filter(temperature, top_k, top_p, min_p, seed, position) for position in range(12)]
    rows = logits.expand(12, -1)
    assert kernels.sample_rows(rows, filters) == REFERENCE.sample_rows(rows, filters)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 8.0])
def test_large_vocabularies_are_sampled_as_the_reference_samples_them(kernels, scale):
    logits = normal(3, 50_021, dtype=torch.float32) * scale
    cases = ((0, 1.0), (50, 1.0), (0, 0.9), (1000, 0.5), (50_021, 0.999))
    filters = [Filter(0.8, top_k, top_p, 0.0, 7, position) for position in range(8) for top_k, top_p in cases]
    rows = logits.expand(len(filters), -1)
    together = kernels.sample_rows(rows, filters)
    assert together == REFERENCE.sample_rows(rows, filters)
    assert together == [kernels.sample_rows(logits[None], [f])[0] for f in filters]


def test_sampling_takes_fp32_rows_and_a_filter_for_each(kernels):
    f = Filter(1.0, 0, 1.0, 0.0, 1, 1)
    for logits in (torch.zeros(2, 3), torch.zeros(3), torch.zeros(1, 3, dtype=torch.bfloat16)):
        with pytest.raises(EngineError, match="1 fp32 rows"):
            kernels.sample_rows(logits, [f])
    assert kernels.sample_rows(torch.zeros(0, 3), []) == []
