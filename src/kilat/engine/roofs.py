"""What a device reaches at best: the roofs that steps are compared with."""

import time
from collections.abc import Callable

import torch

from kilat.engine.utilisation import Roofs

LEAST_RUNS = 8
LEAST_S = 0.4
COPY_BYTES = {"cuda": 1 << 30, "cpu": 128 << 20}
"""Far more than the caches hold."""
PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}


def measure_roofs(device: torch.device, dtype: torch.dtype, threads: int) -> Roofs:
    """Copy a large block, and multiply large matrices of ``dtype``; on the CPU with ``threads``. It takes a second, and for this time 2 GiB
    of a CUDA device."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        copy, product = _copy_rate(device), _product_rate(device, dtype)
    finally:
        torch.set_num_threads(before)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what is left beside the pages is for the steps
    name = f"{str(dtype).removeprefix('torch.')} {PRODUCT_SIZE[device.type]}^3"
    return Roofs(copy, product, name)


def _copy_rate(device: torch.device) -> float:
    """Bytes read plus bytes written a second."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / _best_s(lambda: target.copy_(source), device)


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second. Random values: a device that is short of power runs faster on zeros."""
    n = PRODUCT_SIZE[device.type]
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / _best_s(lambda: torch.mm(a, b, out=out), device)


def _best_s(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of some calls after the first; many, since other work on a machine may hold up most of them."""
    times: list[float] = []
    while len(times) <= LEAST_RUNS or sum(times) < LEAST_S:
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
        else:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return min(times[1:])
