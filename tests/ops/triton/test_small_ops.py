"""Norms, gate, rotation with page write: kernels against the torch references."""

import pytest
import torch

from kilat.ops import rms_norm as norm_reference
from kilat.ops import rope_write as rope_reference
from kilat.ops import silu_mul as silu_reference
from kilat.ops.rope_write import Heads, QkNorm
from kilat.ops.triton.rms_norm import add_rms_norm, rms_norm
from kilat.ops.triton.rope_write import rope_write
from kilat.ops.triton.silu_mul import silu_mul
from tests.ops.triton.steps import Shape, error, pool, step

# one rounding of the dtype apart at most where a sum runs in another order
LIMIT = {torch.float32: 1e-6, torch.float16: 2e-4, torch.bfloat16: 1e-3}


@pytest.fixture
def dtype(request, half):
    """fp32, or the 16-bit type of the device."""
    return half if request.param == "half" else torch.float32


@pytest.mark.parametrize("dtype", ["single", "half"], indirect=True)
@pytest.mark.parametrize("hidden", [64, 576, 4096])
def test_norms_equal_the_reference(device, hidden, dtype):
    x, residual = torch.randn(2, 5, hidden).to(device, dtype)
    weight = torch.randn(hidden).to(device, dtype)
    assert error(rms_norm(x, weight, 1e-5), norm_reference.rms_norm(x, weight, 1e-5)) < LIMIT[dtype]
    expected, total = norm_reference.add_rms_norm(x, residual, weight, 1e-5)
    got, new_residual = add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert error(got, expected) < LIMIT[dtype]
    assert torch.equal(new_residual, total)


@pytest.mark.parametrize("dtype", ["single", "half"], indirect=True)
@pytest.mark.parametrize("width", [96, 1536])
def test_gate_equals_the_reference(device, width, dtype):
    gate_up = (torch.randn(7, 2 * width) * 3).to(device, dtype)
    assert error(silu_mul(gate_up), silu_reference.silu_mul(gate_up)) < LIMIT[dtype]


@pytest.mark.parametrize("dtype", ["single", "half"], indirect=True)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (48, 48), (64, 32)])
def test_rotation_and_page_write_equal_the_reference(device, dim, rotary, qk_norm, dtype):
    shape = Shape(n_q=6, n_kv=2, dim=dim)
    batch = step([1, 20, 3], [40, 20, 65], shape, device)
    heads = Heads(shape.n_q, shape.n_kv, dim)
    qkv = torch.randn(24, (shape.n_q + 2 * shape.n_kv) * dim).to(device, dtype)
    angle = torch.rand(70, rotary // 2) * 6
    cos_sin = torch.cat((angle.cos(), angle.sin()), -1).to(device)
    norm = None
    if qk_norm:
        q_weight, k_weight = torch.randn(2, dim).to(device, dtype)
        norm = QkNorm(q_weight, k_weight, 1e-6)
    written, expected_kv = pool(batch, shape, dtype), pool(batch, shape, dtype)
    q = rope_write(qkv, cos_sin, written, batch, heads, norm)
    expected_q = rope_reference.rope_write(qkv, cos_sin, expected_kv, batch, heads, norm)
    assert error(q, expected_q) < LIMIT[dtype]
    # NaN marks slots that no row owns: still there, and nowhere else
    assert torch.equal(written.isnan(), expected_kv.isnan())
    assert error(written.nan_to_num(), expected_kv.nan_to_num()) < LIMIT[dtype]


@pytest.mark.parametrize("dtype", ["single", "half"], indirect=True)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_q_alone_and_k_and_v_alone_have_the_bits_of_both_together(device, qk_norm, dtype):
    shape = Shape(n_q=6, n_kv=2, dim=48)
    batch = step([1, 20, 3], [40, 20, 65], shape, device)
    qkv = torch.randn(24, (shape.n_q + 2 * shape.n_kv) * 48).to(device, dtype)
    angle = torch.rand(70, 24) * 6
    cos_sin = torch.cat((angle.cos(), angle.sin()), -1).to(device)
    norm = QkNorm(*torch.randn(2, 48).to(device, dtype), 1e-6) if qk_norm else None
    for run in (rope_write, rope_reference.rope_write):
        expected_kv, written = pool(batch, shape, dtype), pool(batch, shape, dtype)
        expected_q = run(qkv, cos_sin, expected_kv, batch, Heads(6, 2, 48), norm)
        untouched = written.clone()
        q = run(qkv[:, : 6 * 48], cos_sin, written, batch, Heads(6, 0, 48), norm)
        assert torch.equal(q, expected_q)
        assert torch.equal(written.nan_to_num(), untouched.nan_to_num())
        none = run(qkv[:, 6 * 48 :], cos_sin, written, batch, Heads(0, 2, 48), norm)
        assert none.shape == (24, 0, 48)
        assert torch.equal(written.nan_to_num(), expected_kv.nan_to_num())
        assert torch.equal(written.isnan(), expected_kv.isnan())
