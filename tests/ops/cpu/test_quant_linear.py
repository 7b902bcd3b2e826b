"""linear with weights that stay in GGUF's blocks: the numbers of the file, products as the header says, the same bits in any company."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.base.errors import EngineError
from tests.ops.cpu.block_cases import GROUP, TYPES, blocks, rounded, type_name, values
from tests.ops.cpu.cases import amid_nan, different_bits, normal

pytestmark = pytest.mark.cpu
BF16 = torch.bfloat16
ROWS = 71
by_type = pytest.mark.parametrize("ggml_type", TYPES, ids=type_name)


@by_type
@pytest.mark.parametrize("n", [1, 31, 32, 33, 200])
def test_packed_rows_are_those_of_the_file_to_the_bit(kernels, ggml_type, n):
    w = blocks(ggml_type, n, 512, seed=n)
    packed = kernels.blocks.pack([w], None)
    ids = torch.cat([torch.arange(n), torch.tensor([0, n - 1])]).int()
    assert not different_bits(kernels.blocks.gather(ids, packed), values(w, BF16)[ids.long()], n)


@by_type
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_product_is_that_of_the_files_values_with_rounded_rows(kernels, ggml_type, with_bias):
    """The sums of integers are exact, so what may differ is 16 additions in fp32 and the rounding to bf16 at the end."""
    n, k = 75, 512
    w = blocks(ggml_type, n, k, seed=ggml_type)
    bias = normal(1, n, dtype=BF16) if with_bias else None
    packed = kernels.blocks.pack([w], bias)
    x = normal(2, ROWS, k, dtype=BF16)
    exact_x, exact_w = rounded(x), values(w).double()
    exact = exact_x @ exact_w.t() + (bias.double() if with_bias else 0)
    terms = exact_x.abs() @ exact_w.abs().t()
    allowed = 2**-8 * exact.abs() + 2**-18 * terms
    for rows in (1, 2, 6, 7, 13, 64, ROWS):
        got = kernels.linear(x[:rows], packed).double()
        assert (got - exact[:rows]).abs().sub(allowed[:rows]).max() <= 0


@by_type
def test_rounding_rows_costs_no_more_than_half_a_step_of_each_value(kernels, ggml_type):
    """Against the product with x as it was: |y - y'| <= sum over groups of scale / 2 * sum |w|."""
    n, k = 64, 768
    w = blocks(ggml_type, n, k, seed=3)
    x = normal(4, 9, k, dtype=BF16)
    exact_w = values(w).double()
    exact = x.double() @ exact_w.t()
    half_step = x.double().abs().view(9, -1, GROUP).amax(-1) / 254 * 1.001
    of_groups = exact_w.abs().view(n, -1, GROUP).sum(-1)
    allowed = half_step @ of_groups.t() + 2**-8 * exact.abs() + 1e-4
    got = kernels.linear(x, kernels.blocks.pack([w], None)).double()
    assert (got - exact).abs().sub(allowed).max() <= 0


def test_fp32_sums_are_added_in_one_order_whatever_the_magnitudes(kernels):
    w = blocks(8, 32, 4096, seed=1)
    x = normal(2, 3, 4096, dtype=BF16) * torch.logspace(-6, 6, 4096).to(BF16)
    packed = kernels.blocks.pack([w], None)
    whole = kernels.linear(x.repeat(10, 1), packed)
    for row in range(30):
        assert not different_bits(kernels.linear(x[row % 3 : row % 3 + 1], packed), whole[row : row + 1], 1)


@settings(max_examples=30)
@given(
    parts=st.lists(st.tuples(st.sampled_from(TYPES), st.integers(1, 100)), min_size=1, max_size=3),
    groups=st.integers(1, 4),
    first=st.integers(0, ROWS - 1),
    rows=st.integers(1, ROWS),
    seed=st.integers(0, 2**20),
)
def test_row_has_same_bits_in_any_batch_and_on_any_number_of_threads(
    kernels, lone, parts, groups, first, rows, seed
):
    k = groups * 256
    weights = [blocks(t, n, k, seed + i) for i, (t, n) in enumerate(parts)]
    n = sum(w.shape[0] for w in weights)
    x, bias = normal(seed, ROWS, k, dtype=BF16), normal(seed + 1, n, dtype=BF16)
    packed = kernels.blocks.pack(weights, bias)
    whole = kernels.linear(x, packed)
    last = min(first + rows, ROWS)
    assert not different_bits(kernels.linear(x[first:last], packed), whole[first:last], seed)
    assert not different_bits(lone.linear(x[first:last], packed), whole[first:last], seed)


@by_type
def test_every_number_of_rows_has_the_bits_of_one_row(kernels, ggml_type):
    k = 256
    x, packed = normal(1, ROWS, k, dtype=BF16), kernels.blocks.pack([blocks(ggml_type, 40, k)], None)
    alone = torch.cat([kernels.linear(x[i : i + 1], packed) for i in range(ROWS)])
    for rows in range(2, ROWS):
        assert not different_bits(kernels.linear(x[:rows], packed), alone[:rows], rows)


def test_parts_of_different_formats_are_the_products_of_each(kernels):
    k = 256
    weights = [blocks(t, n, k, seed=t) for t, n in [(6, 96), (8, 33), (12, 64), (14, 1)]]
    x, bias = normal(1, 9, k, dtype=BF16), normal(2, 194, dtype=BF16)
    got = kernels.linear(x, kernels.blocks.pack(weights, bias))
    biases = bias.split([w.shape[0] for w in weights])
    alone = [kernels.linear(x, kernels.blocks.pack([w], b)) for w, b in zip(weights, biases)]
    assert not different_bits(got, torch.cat(alone, 1), 1)


@pytest.mark.parametrize("rows", [1, 5, 16, 70])
@pytest.mark.parametrize("formats", [(2, 2), (6, 8), (14, 12)], ids=["same", "small", "large"])
def test_gate_in_the_product_gives_the_bits_of_gate_after_it(kernels, lone, formats, rows):
    k, inner = 512, 96
    packed = kernels.blocks.pack([blocks(t, inner, k, seed=i) for i, t in enumerate(formats)], None)
    x = normal(3, rows, k, dtype=BF16)
    expected = kernels.silu_mul(kernels.linear(x, packed))
    assert not different_bits(kernels.gated_linear(x, packed), expected, 3)
    assert not different_bits(lone.gated_linear(x, packed), expected, 3)


def test_gates_that_do_not_fill_panels_are_applied_too(kernels):
    packed = kernels.blocks.pack([blocks(2, 40, 64), blocks(2, 40, 64, seed=1)], None)
    x = normal(3, 4, 64, dtype=BF16)
    assert not different_bits(kernels.gated_linear(x, packed), kernels.silu_mul(kernels.linear(x, packed)), 3)


@by_type
@pytest.mark.parametrize("rows", [1, 7, 65])
def test_nothing_past_a_row_is_read(kernels, ggml_type, rows):
    x = normal(1, rows, 256, dtype=BF16)
    packed = kernels.blocks.pack([blocks(ggml_type, 50, 256)], None)
    assert not different_bits(kernels.linear(amid_nan(x), packed), kernels.linear(x, packed), 1)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_row_that_is_not_finite_becomes_nan_and_stays_alone(kernels, bad):
    x = normal(5, 40, 96, dtype=BF16)
    packed = kernels.blocks.pack([blocks(3, 70, 96)], None)
    clean = kernels.linear(x, packed)
    x[17, 50] = bad
    got = kernels.linear(x, packed)
    assert got[17].isnan().all()
    others = [i for i in range(40) if i != 17]
    assert not different_bits(got[others], clean[others], 5)


def test_rows_too_small_to_scale_count_as_zero_and_small_ones_do_not(kernels):
    w = blocks(8, 32, 64)
    packed = kernels.blocks.pack([w], None)
    x = normal(1, 2, 64, dtype=BF16)
    assert not kernels.linear(x * 1e-33, packed).any()
    small = (x * 2.0**-80).to(BF16)
    got, expected = kernels.linear(small, packed).double(), rounded(small) @ values(w).double().t()
    assert (got - expected).norm() < 0.01 * expected.norm()


def test_packed_weight_keeps_nothing_of_the_blocks_and_may_come_from_a_view(kernels):
    w = blocks(2, 64, 128)
    wide = torch.zeros(64, w.data.shape[1] + 5, dtype=torch.uint8)
    view = wide[:, 3 : 3 + w.data.shape[1]]
    view.copy_(w.data)
    packed = kernels.blocks.pack([type(w)(view, 2, (64, 128))], None)
    x = normal(1, 4, 128, dtype=BF16)
    expected = kernels.linear(x, kernels.blocks.pack([w], None))
    wide.fill_(255)
    assert not different_bits(kernels.linear(x, packed), expected, 1)


@pytest.mark.parametrize(
    ("ggml_type", "most"), [(2, 4.5), (3, 5), (6, 5.5), (8, 8.5), (12, 4.63), (14, 6.57)]
)
def test_packed_weight_takes_about_the_bytes_of_its_blocks(kernels, ggml_type, most):
    """Bits of a value; the K formats' scales are not packed as tightly as in a file."""
    packed = kernels.blocks.pack([blocks(ggml_type, 320, 2048)], None)
    assert packed.n_bytes * 8 <= most * 320 * 2048
    assert packed.shape == (320, 2048) and packed.dtype == BF16


def test_no_rows_give_no_rows(kernels):
    packed = kernels.blocks.pack([blocks(2, 5, 32)], None)
    assert kernels.linear(torch.empty(0, 32, dtype=BF16), packed).shape == (0, 5)
    assert kernels.blocks.gather(torch.empty(0, dtype=torch.int32), packed).shape == (0, 32)


def test_only_formats_with_a_product_are_named(kernels):
    assert kernels.blocks.types == {t: 256 if t >= 12 else 32 for t in TYPES}
    w = blocks(2, 4, 32)
    for other in (0, 1, 10, 30, 63, -1):
        with pytest.raises(EngineError, match=f"type {other}"):
            kernels.blocks.pack([type(w)(w.data, other, (4, 32))], None)


@pytest.mark.parametrize("shape", [(4, 64), (5, 32), (4, 31)])
def test_blocks_that_do_not_hold_the_shape_are_refused(kernels, shape):
    w = blocks(2, 4, 32)
    with pytest.raises(EngineError, match=f"{shape[0]} x {shape[1]}"):
        kernels.blocks.pack([type(w)(w.data, 2, shape)], None)


def test_parts_of_different_width_are_refused(kernels):
    with pytest.raises(EngineError, match="do not hold"):
        kernels.blocks.pack([blocks(2, 4, 64), blocks(2, 4, 32)], None)


def test_more_parts_than_a_weight_has_are_refused(kernels):
    with pytest.raises(EngineError, match="9 parts, limit 8"):
        kernels.blocks.pack([blocks(2, 4, 32)] * 9, None)


@pytest.mark.parametrize("ids", [[0, 4], [-1], [2**31 - 1]])
def test_row_outside_the_weight_is_refused(kernels, ids):
    packed = kernels.blocks.pack([blocks(2, 4, 32)], None)
    with pytest.raises(EngineError, match="outside the 4 rows"):
        kernels.blocks.gather(torch.tensor(ids, dtype=torch.int32), packed)


@pytest.mark.parametrize("x", [torch.zeros(2, 32), torch.zeros(2, 64, dtype=BF16)], ids=["dtype", "width"])
def test_input_that_does_not_fit_is_refused(kernels, x):
    packed = kernels.blocks.pack([blocks(2, 40, 32)], None)
    with pytest.raises(EngineError, match="40 x 32"):
        kernels.linear(x, packed)
