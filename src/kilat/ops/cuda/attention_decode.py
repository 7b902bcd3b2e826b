"""Attention of rows with few tokens on Hopper: launches of attention_decode.cu."""

import ctypes
import functools
import logging
from pathlib import Path

import torch
from torch import Tensor

from kilat.base.errors import ConfigError
from kilat.base.log import get_logger
from kilat.ops.cuda import driver
from kilat.ops.cuda.compile import cubin
from kilat.ops.fp8_linear import FP8
from kilat.ops.triton.attention_call import LOG2E, Call

SOURCES = tuple(Path(__file__).with_name(name) for name in ("ptx.cuh", "attention_decode.cu"))
TILE, DIM, WARPS, COLUMNS = 16, 128, 8, 8
"""Tokens of a tile, elements of a head, warps of a block (as attention_decode.cu has them), queries of a key/value head at most."""
PART_FLOATS = 36 * 32
FEWEST_ROWS, MOST_ROWS = 9, 1024
"""With fewer rows Triton's kernel measured better on an H200; of more the line does not fit beside the rings."""
LEAST_TILES = 4
STAGES = {True: 4, False: 2}
"""Tiles in flight a warp with pages of e4m3 and of bf16. More are no faster, and shared memory that is left lets the next kernel start."""


class _Args(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "kv", "out", "out_scale", "k_scale", "v_scale", "part", "done")),
        *((name, ctypes.c_void_p) for name in ("row_start", "kv_len", "table")),
        ("page_stride", ctypes.c_longlong), ("v_offset", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("token_stride", "head_stride", "table_width", "page_tiles", "n_rows", "n_kv")),
        *((name, ctypes.c_int) for name in ("group", "few", "shares", "least", "out_stride")),
        ("scale", ctypes.c_float),
    ]  # fmt: skip


def few_tokens(group: int) -> int:
    """The most tokens of a row that the kernel takes where ``group`` query heads share a key/value head; 0: none."""
    return COLUMNS // group


@functools.cache
def can_run() -> bool:
    """Whether this machine has a Hopper device, a driver and a compiler for it; says once what is missing on one that has the device."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return False
    try:
        if not driver.present():
            raise ConfigError("no libcuda.so.1 with cuLaunchKernelEx")
        cubin(SOURCES, options(fp8=True))
    except ConfigError as e:
        get_logger("ops").log(logging.WARNING, "attention of decode rows stays with Triton: %s", e)
        return False
    return True


def takes(q: Tensor, kv: Tensor, n_rows: int, page_tokens: int, window: int) -> bool:
    """Whether the kernel computes this call: bf16 queries over bf16 or e4m3 pages of whole tiles, some rows, full attention."""
    group, aligned = q.shape[1] // kv.shape[3], kv.stride(3) * kv.element_size() % 16 == 0
    return (
        FEWEST_ROWS <= n_rows <= MOST_ROWS and window == 0 and q.shape[2] == DIM and page_tokens % TILE == 0
        and few_tokens(group) > 0 and q.dtype == torch.bfloat16 and kv.dtype in (torch.bfloat16, FP8) and aligned
        and can_run()
    )  # fmt: skip


def decode_rows(call: Call, done: Tensor) -> None:
    """Writes ``call.out`` for every token of rows with 1 .. call.few tokens, few <= few_tokens. ``done`` int32 [>= B * Hkv] is zero before
    and after."""
    kv, fp8 = call.kv, call.kv.dtype == FP8
    if kv.is_meta:
        cubin(SOURCES, options(fp8=fp8))
        return
    blocks = torch.cuda.get_device_properties(kv.device).multi_processor_count
    part = torch.empty(part_floats(blocks), dtype=torch.float32, device=kv.device)
    how = driver.Launch(blocks, 32 * WARPS, shared_bytes(call.batch.kv_len.shape[0], fp8=fp8))
    stream = torch.cuda.current_stream(kv.device).cuda_stream
    driver.launch(_function(fp8, kv.get_device()), how, stream, (arguments(call, done, part, blocks),))


def arguments(call: Call, done: Tensor, part: Tensor, blocks: int) -> _Args:
    """What the kernel is given; ``part`` has part_floats. It holds addresses: the tensors must live until the kernel has run."""
    batch, kv, size, scale = call.batch, call.kv, call.kv.element_size(), call.out_scale
    return _Args(
        *map(_address, (call.q, kv, call.out, scale, call.k_scale, call.v_scale, part, done)),
        *map(_address, (batch.row_start, batch.kv_len, batch.page_table)),
        kv.stride(0) * size, kv.stride(1) * size, kv.stride(2) * size, kv.stride(3) * size, batch.page_table.shape[1],
        batch.page_tokens // TILE, batch.kv_len.shape[0], call.n_kv, call.group, call.few, blocks * WARPS // call.n_kv, LEAST_TILES,
        0 if scale is None else scale.stride(0), call.scale * LOG2E,
    )  # fmt: skip


def part_floats(blocks: int) -> int:
    """Room for what ``blocks`` leave of rows that they share: two parts for each warp."""
    return blocks * WARPS * 2 * PART_FLOATS


def shared_bytes(n_rows: int, *, fp8: bool) -> int:
    """Shared memory of a block: the line of rows, and the rings."""
    return (4 * (WARPS + 3 * n_rows) + 127) // 128 * 128 + WARPS * STAGES[fp8] * 2 * TILE * DIM * (
        1 if fp8 else 2
    )


def options(*, fp8: bool) -> tuple[str, ...]:
    """Macros of a variant."""
    return (f"-DFP8={int(fp8)}", f"-DSTAGES={STAGES[fp8]}")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@functools.cache
def _function(fp8: bool, device: int) -> int:
    """The loaded kernel; ``device`` is the current one, whose context it is loaded into."""
    return driver.load_function(cubin(SOURCES, options(fp8=fp8)), "decode", shared_bytes(MOST_ROWS, fp8=fp8))
