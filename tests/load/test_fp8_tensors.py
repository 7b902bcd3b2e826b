"""FP8 blocks out of safetensors: as they are, dequantized on request, and every way in which their scales can be wrong."""

import json

import pytest
import torch
from safetensors.torch import save_file

from kilat.base.errors import ModelFileError
from kilat.load.files import ModelFiles
from kilat.load.weights import open_weights
from kilat.quant.fp8_blocks import Fp8Weight, dequantize

pytestmark = pytest.mark.cpu
G = torch.Generator().manual_seed(1)
DATA = torch.randn(130, 300, generator=G).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
SCALE = torch.rand(2, 3, generator=G).bfloat16().float()
"""Scales that bf16 can hold, as some checkpoints store them."""


@pytest.fixture
def saved(tmp_path):
    def write(**tensors: torch.Tensor) -> ModelFiles:
        save_file({name.replace("__", "."): t for name, t in tensors.items()}, tmp_path / "model.safetensors")
        return ModelFiles("hf", tmp_path, "m")

    return write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_and_scales_come_back_as_stored(saved, dtype):
    with open_weights(
        saved(w__weight=DATA, w__weight_scale_inv=SCALE.to(dtype), other=torch.ones(2))
    ) as weights:
        w = weights.get_fp8("w.weight")
        assert weights.get_fp8("other") is None
    assert w is not None
    # owned: the file is closed
    assert torch.equal(w.data.view(torch.uint8), DATA.view(torch.uint8))
    assert w.scale.dtype == torch.float32 and torch.equal(w.scale, SCALE)


def test_blocks_are_dequantized_for_who_asks_for_another_type(saved):
    with open_weights(saved(w__weight=DATA, w__weight_scale_inv=SCALE)) as weights:
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(weights.get("w.weight", dtype), dequantize(Fp8Weight(DATA, SCALE), dtype))
        assert weights.shapes()["w.weight"] == (130, 300)


def test_scales_may_lie_in_another_shard(tmp_path):
    save_file({"w.weight": DATA}, tmp_path / "a.safetensors")
    save_file({"w.weight_scale_inv": SCALE}, tmp_path / "b.safetensors")
    index = {"weight_map": {"w.weight": "a.safetensors", "w.weight_scale_inv": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_weights(ModelFiles("hf", tmp_path, "m")) as weights:
        w = weights.get_fp8("w.weight")
    assert w is not None and torch.equal(w.scale, SCALE)


def test_fp8_without_scales_is_refused_with_what_is_missing(saved):
    message = r"stored as F8_E4M3; supported: .*F8_E4M3 with _scale_inv beside it"
    with open_weights(saved(w__weight=DATA)) as weights, pytest.raises(ModelFileError, match=message):
        assert weights.get_fp8("w.weight") is None
        weights.get("w.weight", torch.float32)


@pytest.mark.parametrize(
    ("data", "scale", "message"),
    [
        (
            DATA,
            torch.ones(3, 2),
            r"\[130, 300\] has scales of \[3, 2\], expected one for each block of 128 x 128",
        ),
        (DATA, torch.ones(1), r"has scales of \[1\]"),
        (DATA, torch.ones(2, 3, 1), r"has scales of \[2, 3, 1\]"),
        (DATA, torch.ones(2, 4), r"has scales of \[2, 4\]"),
        (DATA, torch.ones(2, 3, dtype=torch.int32), "stored as I32; supported: F32"),
        (DATA[0].contiguous(), torch.ones(3), r"tensor w\.weight of \[300\]"),
    ],
)
def test_scales_that_do_not_fit_are_refused_with_both_shapes(saved, data, scale, message):
    files = saved(w__weight=data, w__weight_scale_inv=scale)
    with open_weights(files) as weights, pytest.raises(ModelFileError, match=message):
        weights.get_fp8("w.weight")
