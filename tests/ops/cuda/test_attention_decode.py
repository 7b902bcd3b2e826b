"""attention_decode.cu against the reference: on an emulated device where there is none, and compiled on Hopper."""

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from kilat.ops import attention as reference
from kilat.ops.batch import StepBatch
from kilat.ops.cuda import attention_decode as decode
from kilat.ops.fp8_linear import FP8, quantize_rows
from kilat.ops.rope_write import KvScale
from kilat.ops.triton.attention_call import Call
from tests.ops.triton.steps import Shape, error, pool, step

ROOT = Path(__file__).resolve().parents[3]
BLOCKS = 3
"""Of the emulated device: 24 warps."""


@functools.cache
def emulated(fp8: bool, folder: Path) -> ctypes.CDLL:
    out = folder / f"decode{int(fp8)}.so"
    sources = [
        ROOT / "tests/ops/cuda/emulated/attention_decode.cpp",
        ROOT / "native/tests/emulated/emulated.cpp",
    ]
    include = f"-I{ROOT / 'native/tests/emulated'}"
    command = [
        "g++",
        "-std=c++17",
        "-O2",
        "-fPIC",
        "-shared",
        "-w",
        include,
        *decode.options(fp8=fp8),
        *map(str, sources),
        "-o",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(out))


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(
    params=[pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def run(request):
    """(device, call, done) -> None: runs the kernel."""
    if request.param == "cuda":
        if not decode.can_run():
            pytest.skip("needs a Hopper device")
        return torch.device("cuda"), decode.decode_rows
    if torch.cuda.is_available():
        pytest.skip("emulated where there is no device")
    folder = request.getfixturevalue("folder")

    def on_emulated(call: Call, done: torch.Tensor) -> None:
        fp8 = call.kv.dtype == FP8
        part = torch.full((decode.part_floats(BLOCKS),), float("nan"))
        args = decode.arguments(call, done, part, BLOCKS)
        emulated(fp8, folder).run(
            ctypes.byref(args), BLOCKS, decode.shared_bytes(len(call.batch.kv_len), fp8=fp8)
        )

    return torch.device("cpu"), on_emulated


def make(
    counts: list[int],
    lengths: list[int],
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantized: bool = False,
) -> tuple[Call, torch.Tensor, StepBatch]:
    """A call, what the reference gives for it, and its batch."""
    batch = step(counts, lengths, shape, device)
    kv = pool(batch, shape, torch.bfloat16).to(dtype).to(device)
    g = torch.Generator().manual_seed(3)
    q = torch.randn(sum(counts), shape.n_q, shape.dim, generator=g).to(torch.bfloat16).to(device)
    scale = None
    if dtype == FP8:
        scale = KvScale(*(torch.rand(shape.n_kv, generator=g).add(0.5).to(device) for _ in range(2)))
    few = min(decode.few_tokens(shape.n_q // shape.n_kv), max(counts))
    out, out_scale = torch.zeros_like(q), None
    if quantized:
        padded = (len(q) + 3) // 4 * 4
        out, out_scale = (
            torch.zeros(q.shape, dtype=FP8, device=device),
            torch.zeros(shape.n_q, padded, device=device),
        )
    call = Call(q, kv, out, batch, shape.dim**-0.5, 0, few, False, scale, out_scale)
    expected = reference.attention(q, kv, batch, scale=shape.dim**-0.5, kv_scale=scale)
    return call, expected.view(q.shape), batch


def done_for(batch: StepBatch, shape: Shape) -> torch.Tensor:
    return torch.zeros(len(batch.kv_len) * shape.n_kv, dtype=torch.int32, device=batch.kv_len.device)


LLAMA = Shape(8, 2, 128, 16)
MANY = [1, 16, 17, 90, 31, 32, 33, 64, 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    "shape", [LLAMA, Shape(8, 8, 128, 16), Shape(8, 1, 128, 32), Shape(16, 4, 128, 64)], ids=str
)
def test_rows_that_decode_get_what_the_reference_gives(run, dtype, shape):
    device, kernel = run
    call, expected, batch = make([1] * len(MANY), MANY, shape, dtype, device)
    done = done_for(batch, shape)
    kernel(call, done)
    assert error(call.out, expected) < 6e-3
    assert not done.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_a_row_that_all_warps_share_is_merged_whatever_the_order_in_which_they_end(run, dtype):
    device, kernel = run
    call, expected, batch = make([1] * 9, [340, *[3] * 7, 150], LLAMA, dtype, device)
    done = done_for(batch, LLAMA)
    kernel(call, done)
    first = call.out.clone()
    assert error(first, expected) < 6e-3
    for _ in range(2):
        call.out.zero_()
        kernel(call, done)
        assert torch.equal(call.out, first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_drafted_tokens_see_no_token_after_them_and_rows_of_the_other_kernel_are_left_alone(run, dtype):
    device, kernel = run
    counts = [1, 2, 9, 1, 2, 1, 1, 2, 20, 1]
    call, expected, batch = make(counts, [40, 33, 50, 1, 2, 16, 17, 64, 30, 70], LLAMA, dtype, device)
    kernel(call, done_for(batch, LLAMA))
    starts = batch.row_start.tolist()
    for i, n in enumerate(counts):
        rows = slice(starts[i], starts[i + 1])
        if n > 2:
            assert not call.out[rows].any()
        else:
            assert error(call.out[rows], expected[rows]) < 6e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_quantized_output_is_the_plain_one_quantized_to_the_bit(run, dtype):
    device, kernel = run
    plain, _, batch = make([1] * len(MANY), MANY, LLAMA, dtype, device)
    call, _, _ = make([1] * len(MANY), MANY, LLAMA, dtype, device, quantized=True)
    kernel(plain, done_for(batch, LLAMA))
    kernel(call, done_for(batch, LLAMA))
    data, scale = quantize_rows(plain.out.view(len(MANY), -1))
    assert torch.equal(call.out.view(len(MANY), -1).view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(call.out_scale[:, : len(MANY)].t(), scale)


def test_a_step_without_such_rows_writes_nothing(run):
    device, kernel = run
    call, _, batch = make([20] * 9, [20] * 9, LLAMA, torch.bfloat16, device)
    kernel(call, done_for(batch, LLAMA))
    assert not call.out.any()


@pytest.mark.cpu
def test_calls_that_the_kernel_does_not_know_stay_with_the_others(monkeypatch):
    monkeypatch.setattr(decode, "can_run", lambda: True)
    q, kv = torch.zeros(16, 8, 128, dtype=torch.bfloat16), torch.zeros(4, 2, 16, 2, 128, dtype=torch.bfloat16)
    assert decode.takes(q, kv, 16, 16, 0)
    assert not decode.takes(q, kv, decode.FEWEST_ROWS - 1, 16, 0)
    assert not decode.takes(q, kv, decode.MOST_ROWS + 1, 16, 0)
    assert not decode.takes(q, kv, 16, 16, 4096), "a window"
    assert not decode.takes(q, kv, 16, 8, 0), "a tile in two pages"
    assert not decode.takes(q[:, :, :64], kv[..., :64], 16, 16, 0), "heads of 64"
    assert not decode.takes(q.float(), kv, 16, 16, 0)
    assert not decode.takes(q.repeat(1, 4, 1), kv, 16, 16, 0), "16 queries a head"
