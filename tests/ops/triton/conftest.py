"""The same parity tests run compiled on a GPU and interpreted where there is none; where Triton is missing there is nothing to collect."""

import importlib.util
import os

import pytest
import torch

found = importlib.util.find_spec("triton")
# a folder called triton, such as this one, is found too, but it has no origin
collect_ignore_glob = [] if found is not None and found.origin else ["test_*.py"]
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(
    params=[pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request) -> torch.device:
    """Where the kernels run: interpreted on the CPU, or compiled on the GPU."""
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU and interpreted where there is none")
    return torch.device(request.param)


@pytest.fixture
def half(device) -> torch.dtype:
    """The 16-bit type to test with: the interpreter truncates bf16 and cannot multiply it."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16
