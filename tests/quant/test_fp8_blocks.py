"""FP8 block checkpoints: which configs are taken, and weights cut and stacked without a changed number."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kilat.base.errors import ConfigError
from kilat.ops.fp8_linear import dequantize, quantize_weight
from kilat.quant.fp8_blocks import checkpoint_quant, cut_columns, keeps_blocks, stack_rows

pytestmark = pytest.mark.cpu
FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def test_config_without_quantization_is_plain_and_fp8_blocks_are_known():
    assert checkpoint_quant({}) == checkpoint_quant({"quantization_config": None}) == "none"
    assert checkpoint_quant({"quantization_config": FP8_CONFIG}) == "fp8"
    full = {"fmt": "e4m3", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
    assert checkpoint_quant({"quantization_config": {**FP8_CONFIG, **full}}) == "fp8"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "awq"}, r"quant_method 'awq', supported: 'fp8'.*--quant fp8"),
        ({"quant_method": None}, "quant_method None"),
        ({"weight_block_size": [64, 128]}, r"weight_block_size \[64, 128\], supported: \[128, 128\]"),
        ({"weight_block_size": None}, "weight_block_size None"),
        ({"fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt, which this version does not know"),
    ],
)
def test_other_quantization_is_refused_with_what_was_found_and_a_way_out(change, message):
    with pytest.raises(ConfigError, match=message):
        checkpoint_quant({"quantization_config": {**FP8_CONFIG, **change}})


def test_quantization_config_that_is_no_object_is_refused():
    with pytest.raises(ConfigError, match="expected an object"):
        checkpoint_quant({"quantization_config": "fp8"})


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_shares_that_keep_blocks_have_the_values_of_the_whole(data):
    """The oracle is the dequantized whole; shares that do not keep blocks would take a wrong scale for some rows."""
    tensors, shares = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        n = data.draw(st.sampled_from([1, 64, 128, 200, 256, 384]))
        start = data.draw(st.sampled_from([0, 0, 64, 128]))
        stop = data.draw(st.sampled_from([n, 128, 256]))
        if start >= min(stop, n):
            start, stop = 0, n
        shares.append(slice(start, min(stop, n)))
        tensors.append(torch.randn(n, 130) * torch.rand(n, 1).mul(6).exp())
    weights = [quantize_weight(t) for t in tensors]
    expected = torch.cat([dequantize(w, torch.float32)[s] for w, s in zip(weights, shares)])
    if not keeps_blocks(shares):
        assert any(s.start % 128 or (s.stop - s.start) % 128 for s in shares)
        return
    assert torch.equal(dequantize(stack_rows(weights, shares), torch.float32), expected)


def test_share_of_columns_has_the_values_of_the_whole():
    w = quantize_weight(torch.randn(140, 400) * torch.logspace(-3, 3, 400))
    for share in (slice(0, 128), slice(128, 400), slice(256, 300)):
        assert keeps_blocks([share])
        got = cut_columns(w, share)
        assert got.data.is_contiguous()
        assert torch.equal(dequantize(got, torch.float32), dequantize(w, torch.float32)[:, share])
    assert not keeps_blocks([slice(64, 256)])
