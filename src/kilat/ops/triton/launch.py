"""What all kernels share: programmatic dependent launch, and weights pulled into L2 while the kernel before still runs.

A kernel launched with ``launch_pdl=True`` may start as soon as every program of the kernel before has called ``let_next_start``. Rules:
1. ``let_next_start`` comes first, ``wait_for_previous`` runs in every program, and nothing is written before it.
2. Before ``wait_for_previous`` a kernel reads only weights, the tensors of a StepBatch, and (decode attention) keys and values of tokens
   that are not the step's. The last two are safe because they are written by copies, ordinary launches or earlier steps, and an ordinary
   launch (the embedding lookup) stands between them and the first of our kernels. Who hands a kernel a StepBatch whose older tokens this
   very step has written puts an ordinary launch between (nn/decoder.py does).
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import KernelInterface


@functools.cache
def can_overlap() -> bool:
    """Whether kernels may use programmatic dependent launch and TMA: a compiled run on compute capability 9.0 or newer."""
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


@functools.cache
def sm_count() -> int:
    """Multiprocessors of the current device; 4 where the kernels are interpreted."""
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return 4
    return torch.cuda.get_device_properties().multi_processor_count


def compile_only() -> None:
    """From now on every launch of this process compiles its kernel, if the machine's cache lacks it, and runs nothing."""
    KernelInterface.__getitem__ = lambda self, grid: functools.partial(self.run, grid=grid, warmup=True)


@triton.jit
def let_next_start(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit
def prefetch_l2(address, n_bytes):
    """Starts one copy of ``n_bytes`` (a multiple of 16, same for all) from each 16-byte aligned address to L2; nothing waits for it."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, n_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
