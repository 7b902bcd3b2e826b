"""Products of many rows: which number of rows stands for which, how algorithms are searched, what is kept, and the sums on a device."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kilat.ops.cuda import products
from kilat.ops.cuda.blas_lt import Algorithm, Kind
from kilat.ops.fp8_linear import FP8

KIND = Kind(False, 512, 256, False)


@pytest.mark.cpu
def test_a_size_stands_for_rows_from_three_quarters_of_it_on():
    sizes = {n: products.size_of(n) for n in (65, 95, 96, 128, 129, 191, 192, 256, 384, 513, 768, 1024, 1025)}
    assert sizes == {
        65: 0, 95: 0, 96: 128, 128: 128, 129: 0, 191: 0, 192: 256, 256: 256, 384: 512, 513: 0, 768: 1024, 1024: 1024, 1025: 0
    }  # fmt: skip


@pytest.mark.cpu
def test_search_goes_on_from_the_best_and_times_nothing_twice():
    timed: list[int] = []

    def us(n: int) -> float:
        timed.append(n)
        return float("inf") if n % 7 == 0 else abs(n - 60) + 1.0

    def steps(by: int):
        return lambda n: [n - by, n, n + by]

    found = products.search([10, 20, 21], [steps(30), steps(10), steps(1)], us, lambda n: bytes([n + 100]))
    assert found == [60, 59, 61]
    assert len(timed) == len(set(timed))


@pytest.mark.cpu
def test_search_without_anything_that_runs_finds_nothing():
    assert products.search([1, 2], [lambda n: [n + 1]], lambda n: float("inf"), lambda n: bytes([n])) == []
    assert products.search([], [lambda n: [n]], lambda n: 1.0, lambda n: bytes([n])) == []


@pytest.mark.cpu
def test_picks_are_read_as_they_were_written():
    algorithm = Algorithm()
    algorithm.data[:] = range(3, 11)
    picks = {(KIND, 128): algorithm, (Kind(True, 128, 384, False), 1024): None}
    read = products.read_picks(products.written_picks(picks))
    assert read.keys() == picks.keys()
    assert bytes(read[KIND, 128]) == bytes(algorithm)
    assert read[Kind(True, 128, 384, False), 1024] is None


@pytest.mark.cpu
@pytest.mark.parametrize(
    "text", ["", "{", "[[1]]", "[1]", '[[0, 1, 2, 0, 128, "xy"]]', '[[0, 1, 2, 0, 128, "00"]]']
)
def test_a_file_of_picks_that_makes_no_sense_is_refused(text: str):
    with pytest.raises((ValueError, TypeError)):
        products.read_picks(text)


@pytest.mark.cpu
def test_without_a_device_products_are_torchs_and_nothing_is_measured():
    if torch.cuda.is_available():
        pytest.skip("this machine has a device")
    x, weight, bias = torch.randn(100, 16), torch.randn(8, 16), torch.randn(8)
    mine = products.Products()
    mine.register(weight, bias)
    assert not mine.measure_next(1024)
    assert torch.equal(mine.multiply(x, weight, bias), F.linear(x, weight, bias))


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> products.Products:
    """On a machine on which nothing was measured; algorithms are taken however slow they are, so that it is their sums that are looked at."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("algorithms are measured on Hopper devices")
    monkeypatch.setenv("KILAT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(products, "GAIN", float("inf"))
    return products.Products()


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
def test_measured_products_have_the_sums_of_the_exact_one(mine, bias: bool):
    weight = torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(1024, device="cuda", dtype=torch.bfloat16) if bias else None
    mine.register(weight, b)
    n = 0
    while mine.measure_next(1024):
        n += 1
    assert n == len(products.SIZES)
    assert all(mine.picks.values())
    for rows in (96, 128, 200, 256, 400, 1000):
        x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
        want = x.double() @ weight.double().T + (b.double() if b is not None else 0)
        got = mine.multiply(x, weight, b)
        assert (got - want).abs().max() <= 0.01 * want.abs().max()


@pytest.mark.gpu
def test_measured_fp8_products_have_the_scales_of_their_groups_and_blocks(mine):
    n, k = 384, 640
    weight = torch.randn(n, k, device="cuda").to(FP8)
    scale = torch.zeros(n // 128, 8, device="cuda")
    scale[:, : k // 128] = torch.rand(n // 128, k // 128, device="cuda") + 0.5
    mine.register(weight)
    while mine.measure_next(256):
        pass
    assert all(mine.picks.values())
    by_block = scale[:, : k // 128].repeat_interleave(128, 0).repeat_interleave(128, 1)
    for rows in (96, 128, 252, 256):
        x, x_scale = (
            torch.randn(rows, k, device="cuda").to(FP8),
            torch.rand(k // 128, rows, device="cuda") + 0.5,
        )
        want = (x.double() * x_scale.T.repeat_interleave(128, 1)) @ (weight.double() * by_block).T
        got = mine.multiply(x, weight, x_scale=x_scale, weight_scale=scale)
        assert (got - want).abs().max() <= 0.01 * want.abs().max()


@pytest.mark.gpu
def test_what_was_measured_is_found_by_the_next_process(mine):
    mine.register(torch.randn(512, 256, device="cuda", dtype=torch.bfloat16))
    assert not mine.measure_next(128)  # the weight is gone
    weight = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    mine.register(weight)
    assert mine.measure_next(128) and not mine.measure_next(128)
    later = products.Products()
    later.register(weight)
    assert not later.measure_next(128)
    assert bytes(later.picks[KIND, 128]) == bytes(mine.picks[KIND, 128])


@pytest.mark.gpu
def test_measured_products_can_be_captured(mine):
    weight = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    mine.register(weight)
    mine.measure_next(128)
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
    want = mine.multiply(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = mine.multiply(x, weight)
    graph.replay()
    assert torch.equal(got, want)
