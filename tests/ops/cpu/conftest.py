"""Every test of a kernel runs on each instruction set that this machine has, with one thread and with several."""

import pytest
import torch

from kilat.ops.cpu.kernels import available, cpu_kernels
from kilat.ops.cpu.library import load
from kilat.ops.kernels import Kernels
from tests.ops.cpu import cases


@pytest.fixture(scope="session")
def best_isa() -> int:
    usable, why = available()
    if not usable:
        pytest.skip(why)
    return load().kilat_cpu_best_isa()


@pytest.fixture(scope="session", params=range(4), ids=["plain", "avx2", "avx512", "avx512-bf16"])
def isa(request, best_isa: int) -> int:
    if request.param > best_isa:
        pytest.skip("this processor does not have these instructions")
    return request.param


@pytest.fixture(scope="session")
def kernels(isa: int) -> Kernels:
    """Two threads: the normal case."""
    return cpu_kernels(2, isa=isa)


@pytest.fixture(scope="session")
def lone(isa: int) -> Kernels:
    """One thread: what several must agree with, bit for bit."""
    return cpu_kernels(1, isa=isa)


@pytest.fixture(params=list(cases.TOLERANCE), ids=["fp32", "bf16"])
def dtype(request) -> torch.dtype:
    return request.param
