"""Every test of a kernel runs on each instruction set that this machine has, with one thread and with several."""

import ctypes
from collections.abc import Callable

import pytest
import torch

from kilat.ops.cpu.kernels import available, cpu_kernels
from kilat.ops.cpu.library import load
from kilat.ops.kernels import Kernels
from tests.ops.cpu import amx, cases

# place: number of the set
ISAS = ["plain", "avx2", "avx512", "avx512-bf16"]
# These have products of bf16 of their own; those of quantized weights have the bits of the last one (test_amx.py), and the rest is its own.
TILES = ["amx", "amx-model"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        products = (
            metafunc.module.__name__.endswith("test_linear") or "gated_linear" in metafunc.function.__name__
        )
        metafunc.parametrize("isa", ISAS + TILES * products, indirect=True, scope="session")


@pytest.fixture(scope="session")
def best_isa() -> int:
    usable, why = available()
    if not usable:
        pytest.skip(why)
    return load().kilat_cpu_best_isa()


@pytest.fixture(scope="session")
def isa(request, best_isa: int) -> tuple[ctypes.CDLL, int]:
    """A library and the number of one of its instruction sets."""
    if request.param == "amx-model" and best_isa >= amx.AVX512_BF16:
        return amx.model_library(), amx.AMX
    level = {name: i for i, name in enumerate([*ISAS, "amx"])}.get(request.param, amx.AMX)
    if level > best_isa:
        pytest.skip("this processor does not have these instructions")
    return load(), level


@pytest.fixture(scope="session")
def kernels_of(isa: tuple[ctypes.CDLL, int]) -> Callable[[int], Kernels]:
    """Kernels on so many threads."""
    library, level = isa
    return lambda threads: cpu_kernels(threads, isa=level, library=library)


@pytest.fixture(scope="session")
def kernels(kernels_of) -> Kernels:
    """Two threads: the normal case."""
    return kernels_of(2)


@pytest.fixture(scope="session")
def lone(kernels_of) -> Kernels:
    """One thread: what several must agree with, bit for bit."""
    return kernels_of(1)


@pytest.fixture(params=list(cases.TOLERANCE), ids=["fp32", "bf16"])
def dtype(request) -> torch.dtype:
    return request.param
