"""Block formats: every one equals the gguf package's own reference, at any size and in any dtype, with little memory."""

import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from kilat.base.errors import ModelFileError
from kilat.base.gguf_header import GGML_TYPES
from kilat.quant.gguf_blocks import BlockWeight, cut_columns, dequantize_into, require_supported

pytestmark = pytest.mark.cpu

BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
WRITABLE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPES = {kind.name: (number, kind) for number, kind in GGML_TYPES.items()}


def random_blocks(name: str, n_blocks: int, seed: int = 0) -> np.ndarray:
    """[n_blocks, block_bytes] of random bytes; scales (fp16, somewhere in the block) may be infinite or NaN."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n_blocks, TYPES[name][1].block_bytes), dtype=np.uint8)


def decode(raw: np.ndarray, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    number, kind = TYPES[name]
    out = torch.full((raw.size // kind.block_bytes * kind.block_items,), 7.0, dtype=dtype)
    dequantize_into(out, memoryview(bytearray(raw.tobytes())), number)
    return out


def reference(raw: np.ndarray, name: str) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(dequantize(raw, GGMLQuantizationType[name])).reshape(-1)


# One block, a few, just below, at and above one internal step (65,536 values), and several steps.
@pytest.mark.parametrize("n_values", [256, 1024, 65_280, 65_536, 65_792, 200_704])
@pytest.mark.parametrize("name", BLOCKS)
def test_random_blocks_equal_the_reference(name, n_values):
    raw = random_blocks(name, n_values // TYPES[name][1].block_items)
    assert torch.equal(decode(raw, name).nan_to_num(), reference(raw, name).nan_to_num())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BLOCKS)
def test_other_dtypes_are_the_exact_value_rounded_once(name, dtype):
    raw = random_blocks(name, 512, seed=1)
    assert torch.equal(decode(raw, name, dtype).nan_to_num(), reference(raw, name).to(dtype).nan_to_num())


@pytest.mark.parametrize("name", WRITABLE)
def test_quantized_weights_come_back_within_half_a_level(name):
    """Independent of the reference's reader: values go in through its writer and must come out near where they were."""
    weights = np.random.default_rng(2).standard_normal((64, 256)).astype(np.float32)
    raw = quantize(weights, GGMLQuantizationType[name])
    error = (decode(raw, name) - torch.from_numpy(weights).reshape(-1)).abs().view(-1, 32).amax(1)
    span = torch.from_numpy(weights).view(-1, 32)
    levels = {"Q4_0": 16, "Q4_1": 16, "Q5_0": 32, "Q5_1": 32, "Q8_0": 255}[name]
    allowed = 2 * span.abs().amax(1) / levels
    assert torch.all(error <= 1.05 * allowed)


def test_a_block_written_by_hand_is_read_as_the_format_says():
    scale = np.array([0.5], np.float16).tobytes()
    q8 = np.frombuffer(scale + np.arange(-16, 16, dtype=np.int8).tobytes(), np.uint8)
    assert decode(q8, "Q8_0").tolist() == [0.5 * i for i in range(-16, 16)]
    nibbles = bytes(low | (15 - low) << 4 for low in range(16))
    q4 = np.frombuffer(scale + nibbles, np.uint8)
    assert decode(q4, "Q4_0").tolist() == [0.5 * (i - 8) for i in [*range(16), *reversed(range(16))]]
    minimum = np.array([-3], np.float16).tobytes()
    q41 = np.frombuffer(scale + minimum + nibbles, np.uint8)
    assert decode(q41, "Q4_1").tolist() == [0.5 * i - 3 for i in [*range(16), *reversed(range(16))]]


@pytest.mark.parametrize("name", PLAIN)
def test_plain_arrays_are_copied_bit_for_bit(name):
    values = torch.randn(100_000).to(PLAIN[name])
    raw = values.view(torch.uint8).numpy()
    assert torch.equal(decode(raw, name, PLAIN[name]), values)
    assert torch.equal(decode(raw, name), values.float())


@pytest.mark.parametrize("name", ["Q2_K", "IQ4_XS", "MXFP4", "I32", "F64"])
def test_format_that_is_not_supported_is_named_with_what_is(name):
    with pytest.raises(ModelFileError, match=f"'blk.0.x' is stored as {name}; supported: F32, F16, Q4_0"):
        require_supported(TYPES[name][0], "blk.0.x")
    raw = random_blocks(name, 4)
    with pytest.raises(ModelFileError, match=name):
        decode(raw, name)


@pytest.mark.parametrize("name", [*BLOCKS, *PLAIN])
def test_supported_formats_are_accepted(name):
    require_supported(TYPES[name][0], "t")
    assert (
        decode(np.zeros(TYPES[name][1].block_bytes, np.uint8), name).tolist()
        == [0.0] * TYPES[name][1].block_items
    )


@pytest.mark.parametrize("n_bytes", [33, 35, 68])
def test_bytes_that_do_not_fit_the_values_are_refused(n_bytes):
    with pytest.raises(ModelFileError, match="do not hold"):
        dequantize_into(torch.empty(32), memoryview(bytearray(n_bytes)), TYPES["Q8_0"][0])


def test_infinite_scales_give_no_warning():
    raw = np.frombuffer(np.array([np.inf], np.float16).tobytes() + bytes(32), np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode(raw, "Q8_0").isnan().all()


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K", "Q4_K"])
def test_temporary_memory_does_not_grow_with_the_tensor(name):
    number, kind = TYPES[name]
    n_blocks = (4 << 20) // kind.block_items
    out = torch.empty(n_blocks * kind.block_items, dtype=torch.bfloat16)
    raw = memoryview(bytearray(n_blocks * kind.block_bytes))
    tracemalloc.start()
    try:
        dequantize_into(out, raw, number)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q6_K"])
def test_a_share_of_inputs_keeps_whole_blocks(name):
    number, kind = TYPES[name]
    n, k = 3, 4 * kind.block_items
    raw = random_blocks(name, n * 4)
    whole = BlockWeight(torch.from_numpy(raw.reshape(n, -1)), number, (n, k))
    share = slice(kind.block_items, 3 * kind.block_items)
    cut = cut_columns(whole, share)
    assert cut is not None and cut.shape == (n, 2 * kind.block_items) and cut.ggml_type == number
    found = decode(cut.data.contiguous().numpy(), name).view(cut.shape)
    assert torch.equal(found.nan_to_num(), decode(raw, name).view(n, k)[:, share].nan_to_num())
    assert torch.equal(cut_columns(whole, slice(0, k)).data, whole.data)


@pytest.mark.parametrize("share", [slice(16, 64), slice(32, 80), slice(0, 33)])
def test_a_share_that_would_cut_a_block_is_none(share):
    assert (
        cut_columns(BlockWeight(torch.zeros(2, 54, dtype=torch.uint8), TYPES["Q4_0"][0], (2, 96)), share)
        is None
    )
