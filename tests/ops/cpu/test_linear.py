"""linear on the CPU: right, and the same bits for a row in any company."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.base.errors import EngineError
from tests.ops.cpu.cases import amid_nan, differences, different_bits, normal

pytestmark = pytest.mark.cpu

SIZES = [(1, 1), (33, 7), (64, 64), (100, 129), (65, 2), (31, 576), (960, 96), (96, 1537)]
ROWS = 131


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_linear_agrees_with_product_in_double_precision(kernels, dtype, n, k, with_bias):
    seed = n * 10_000 + k
    weight = normal(seed, n, k, dtype=dtype, scale=k**-0.5)
    bias = normal(seed + 1, n, dtype=dtype) if with_bias else None
    x = normal(seed + 2, ROWS, k, dtype=dtype)
    exact = x.double() @ weight.double().t() + (bias.double() if with_bias else 0)
    packed = kernels.pack_linear(weight.clone(), bias)
    for rows in (1, 2, 6, 7, 14, 15, 64, 65, ROWS):
        got = kernels.linear(x[:rows], packed)
        assert got.dtype == dtype
        assert not differences(got, exact[:rows], seed)


@settings(max_examples=25)
@given(
    n=st.integers(1, 200),
    k=st.integers(1, 200),
    first=st.integers(0, ROWS - 1),
    rows=st.integers(1, ROWS),
    seed=st.integers(0, 2**20),
)
def test_row_has_same_bits_in_any_batch_and_on_any_number_of_threads(kernels, lone, n, k, first, rows, seed):
    for dtype in (torch.float32, torch.bfloat16):
        x = normal(seed, ROWS, k, dtype=dtype)
        weight, bias = normal(seed + 1, n, k, dtype=dtype), normal(seed + 2, n, dtype=dtype)
        packed = kernels.pack_linear(weight, bias)
        whole = kernels.linear(x, packed)
        last = min(first + rows, ROWS)
        assert not different_bits(kernels.linear(x[first:last], packed), whole[first:last], seed)
        assert not different_bits(lone.linear(x[first:last], packed), whole[first:last], seed)


def test_wide_output_and_long_rows_keep_bits_across_row_counts(kernels, lone, dtype):
    n, k = 1600, 1100
    x, packed = normal(1, 80, k, dtype=dtype), kernels.pack_linear(normal(2, n, k, dtype=dtype), None)
    whole = kernels.linear(x, packed)
    for rows in (1, 3, 8, 33, 79):
        assert not different_bits(lone.linear(x[:rows], packed), whole[:rows], 1)


@pytest.mark.parametrize("k", [1, 31, 64, 129])
@pytest.mark.parametrize("rows", [1, 5, 16, 70])
def test_nothing_past_a_row_is_read(kernels, dtype, k, rows):
    x = normal(k, rows, k, dtype=dtype)
    packed = kernels.pack_linear(normal(k + 1, 50, k, dtype=dtype), None)
    assert not different_bits(kernels.linear(amid_nan(x), packed), kernels.linear(x, packed), k)


def test_row_of_nan_stays_alone(kernels, dtype):
    x = normal(5, 40, 96, dtype=dtype)
    packed = kernels.pack_linear(normal(6, 70, 96, dtype=dtype), None)
    clean = kernels.linear(x, packed)
    x[17] = torch.nan
    got = kernels.linear(x, packed)
    assert got[17].isnan().all()
    others = [i for i in range(40) if i != 17]
    assert not different_bits(got[others], clean[others], 5)


def test_packed_weight_keeps_nothing_of_the_tensor(kernels, dtype):
    weight, bias, x = (normal(i, *s, dtype=dtype) for i, s in enumerate([(40, 30), (40,), (3, 30)]))
    packed = kernels.pack_linear(weight, bias)
    before = kernels.linear(x, packed)
    weight.fill_(torch.nan)
    assert not different_bits(kernels.linear(x, packed), before, 0)
    assert (
        packed.shape == (40, 30)
        and packed.dtype == dtype
        and packed.n_bytes >= 40 * 30 * weight.element_size()
    )


def test_weight_may_be_any_view(kernels, dtype):
    weight, x = normal(1, 48, 60, dtype=dtype), normal(2, 4, 60, dtype=dtype)
    expected = kernels.linear(x, kernels.pack_linear(weight, None))
    for view in (weight.t().contiguous().t(), amid_nan(weight)):
        assert not different_bits(kernels.linear(x, kernels.pack_linear(view, None)), expected, 1)


def test_no_rows_give_no_rows(kernels, dtype):
    packed = kernels.pack_linear(normal(1, 5, 6, dtype=dtype), None)
    assert kernels.linear(torch.empty(0, 6, dtype=dtype), packed).shape == (0, 5)


@pytest.mark.parametrize(
    "x",
    [torch.zeros(2, 31), torch.zeros(2, 30, dtype=torch.bfloat16), torch.zeros(30)],
    ids=["width", "dtype", "rank"],
)
def test_input_that_does_not_fit_is_refused(kernels, x):
    packed = kernels.pack_linear(torch.zeros(40, 30), None)
    with pytest.raises(EngineError, match="40 x 30"):
        kernels.linear(x, packed)


def test_dtype_that_no_kernel_has_is_refused(kernels):
    with pytest.raises(EngineError, match="float16"):
        kernels.pack_linear(torch.zeros(4, 4, dtype=torch.float16), None)


@pytest.mark.parametrize(("n", "k"), [(32, 64), (70, 33), (5, 6), (129, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_packed_weight_are_the_weights_rows(kernels, dtype, n, k):
    weight = normal(n, n, k, dtype=dtype)
    ids = torch.arange(2 * n, dtype=torch.int32) * 7 % n
    rows = kernels.blocks.gather(ids, kernels.pack_linear(weight, torch.zeros(n, dtype=dtype)))
    assert rows.dtype == dtype and torch.equal(rows, weight[ids.long()])
