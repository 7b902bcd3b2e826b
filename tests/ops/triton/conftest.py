"""The same parity tests run compiled on a GPU and interpreted where there is none; a step to run them on."""

import os

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
pytest.importorskip("triton.language")  # plain "triton" would find this folder


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> "torch.device":
    """Where the kernels run: interpreted on the CPU, or compiled on the GPU."""
    if (request.param == "cuda") != torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU and interpreted where there is none")
    return torch.device(request.param)


@pytest.fixture
def half(device) -> "torch.dtype":
    """The 16-bit type to test with: the interpreter truncates bf16 and cannot multiply it."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16
