"""AMX tiles: when they are chosen, in which order they add, and that every row goes through them. What their products are worth is tested
with the other instruction sets, in test_linear.py and test_small_ops.py."""

import dataclasses
import re
import shutil
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch

from kilat.cli.machine import read_machine
from kilat.ops.cpu import kernels as cpu
from kilat.ops.cpu.build import build
from kilat.ops.cpu.library import load
from tests.nn.test_all_layers import mixed_step, model_of, outcome
from tests.ops.cpu import amx
from tests.ops.cpu.block_cases import TYPES, blocks, type_name
from tests.ops.cpu.cases import different_bits, normal

pytestmark = pytest.mark.cpu
BF16 = torch.bfloat16


@pytest.fixture
def model(best_isa: int):
    if best_isa < amx.AVX512_BF16:
        pytest.skip("this processor does not have the instructions beside which tiles are used")
    return amx.model_library()


@pytest.fixture
def tiles(model) -> cpu.Kernels:
    return cpu.cpu_kernels(2, isa=amx.AMX, library=model)


@pytest.mark.parametrize("fault", amx.FAULTS)
def test_tiles_are_used_only_where_all_is_well(model, fault):
    assert model.kilat_model_try(list(amx.FAULTS).index(fault)) == amx.FAULTS[fault]


SET = """
import sys
from kilat.ops.cpu import kernels
from tests.ops.cpu import amx
library = amx.model_library()
library.kilat_model_fault(int(sys.argv[1]))
kernels.load = lambda: library
print(kernels.cpu_kernels(2).name, kernels.available()[1], sep=": ")
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("whole", "cpu-amx: native kernels, amx"),
        ("absent", "cpu-avx512-bf16: native kernels, avx512-bf16"),
        (
            "refused",
            "cpu-avx512-bf16: native kernels, avx512-bf16; the system does not let this process use the processor's AMX tiles",
        ),
        (
            "permitted in words only",
            "cpu-avx512-bf16: native kernels, avx512-bf16; the processor's AMX tiles failed the check of their products",
        ),
    ],
)
def test_a_process_takes_the_set_that_its_machine_allows_and_says_why(model, fault, said):
    command = [sys.executable, "-c", SET, str(list(amx.FAULTS).index(fault))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == said, done.stderr


def test_machine_without_tiles_computes_as_before_and_says_nothing(best_isa):
    if "amx_bf16" in read_machine().isa:
        pytest.skip("this machine has tiles")
    assert best_isa <= amx.AVX512_BF16 and load().kilat_cpu_amx_note() == b""


def test_every_number_of_rows_goes_through_tiles_and_leaves_none_in_use(model, tiles):
    packed = tiles.pack_linear(normal(1, 64, 96, dtype=BF16), None)
    for rows in (1, 2, 16, 17, 128, 200):
        before = model.kilat_model_products()
        tiles.linear(normal(2, rows, 96, dtype=BF16), packed)
        assert model.kilat_model_products() - before == -(-96 // 32) * 4 * tiles_of(rows)
        assert model.kilat_model_begun() == 0


def tiles_of(rows: int) -> int:
    """Tiles of 16 rows or less in blocks of equal size, of at most 128 rows."""
    blocks = -(-rows // 128)
    sizes = [rows * (b + 1) // blocks - rows * b // blocks for b in range(blocks)]
    return sum(1 if size <= 16 else -(-size // 32) * 2 for size in sizes)


def published_sums(x: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    """x times weight^T in the order of Intel's pseudo code, 16 pairs along k to an instruction. A product of two bf16 is exact in fp32, so
    that an addition rounds as a fused one."""
    pairs = [np.pad(t.float().numpy(), ((0, 0), (0, -t.shape[1] % 32))) for t in (x, weight)]
    a, b = (p.reshape(p.shape[0], -1, 16, 2).transpose(1, 2, 3, 0) for p in pairs)
    total = np.zeros((x.shape[0], weight.shape[0]), np.float32)
    for block_a, block_b in zip(a, b, strict=True):
        halves = np.zeros((2, *total.shape), np.float32)
        for of_a, of_b in zip(block_a, block_b, strict=True):
            halves += of_a[:, :, None] * of_b[:, None, :]
        total += halves[0] + halves[1]
    return total


@pytest.mark.parametrize("machine", ["model", "hardware"])
@pytest.mark.parametrize("k", [1, 32, 75, 576])
def test_sums_are_added_in_the_order_of_the_published_pseudo_code(request, best_isa, machine, k):
    """Of a processor it is a finding, not a need: rows must agree with each other, which its products prove before they are used."""
    if machine == "hardware" and best_isa < amx.AMX:
        pytest.skip("this processor does not have tiles")
    kernels = request.getfixturevalue("tiles") if machine == "model" else cpu.cpu_kernels(2)
    x, weight = normal(k, 50, k, dtype=BF16), normal(k + 1, 70, k, dtype=BF16, scale=k**-0.5)
    expected = torch.from_numpy(published_sums(x, weight)).to(BF16)
    different = different_bits(kernels.linear(x, kernels.pack_linear(weight, None)), expected, k)
    if different and machine == "hardware":
        pytest.xfail(f"this processor adds in another order: {different}")
    assert not different


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 40, 64, 65, 130])
@pytest.mark.parametrize("ggml_type", TYPES, ids=type_name)
def test_quantized_products_have_the_bits_of_other_instruction_sets(model, tiles, ggml_type, rows):
    """Sums of integers are exact, and are scaled and added in one order."""
    other = cpu.cpu_kernels(1, isa=amx.AVX512_BF16)
    x, bias = normal(rows, rows, 512, dtype=BF16), normal(1, 107, dtype=BF16)
    x[rows // 2, 40] = torch.nan
    parts = [blocks(ggml_type, 75, 512, seed=2), blocks(TYPES[0], 32, 512, seed=3)]
    before = model.kilat_model_products()
    got = tiles.linear(x, tiles.blocks.pack(parts, bias))
    assert (model.kilat_model_products() > before) == (rows >= 16) and model.kilat_model_begun() == 0
    assert not different_bits(got, other.linear(x, other.blocks.pack(parts, bias)), rows)
    gated = [blocks(ggml_type, 128, 512, seed=4)]
    got = tiles.fused_gate(x, tiles.blocks.pack(gated, None))
    assert not different_bits(got, other.fused_gate(x, other.blocks.pack(gated, None)), rows)


def test_denormal_values_count_as_zero(tiles):
    x = torch.full((3, 40), 2.0**-130).to(BF16)
    x[1] = 1.0
    weight = torch.full((5, 40), 2.0**127).to(BF16)
    got = tiles.linear(x, tiles.pack_linear(weight, None))
    assert (got[[0, 2]] == 0).all() and (got[1] == torch.inf).all()
    tiny = tiles.pack_linear(torch.full((5, 40), 2.0**-132).to(BF16), None)
    assert (tiles.linear(x, tiny) == 0).all()


@pytest.mark.parametrize("shape", [{}, {"intermediate_size": 128}], ids=["gate apart", "gate fused"])
@pytest.mark.parametrize("name", ["llama", "qwen3-bias"])
def test_all_layers_in_one_call_give_the_bits_of_the_ops_and_of_rows_alone(tiles, model, name, shape):
    decoder = model_of(name, tiles, BF16, **shape)
    batch = mixed_step(decoder)
    before = model.kilat_model_products()
    logits, pages = outcome(decoder, batch, in_one_call=True)
    assert model.kilat_model_products() > before and model.kilat_model_begun() == 0
    expected, expected_pages = outcome(decoder, batch, in_one_call=False)
    assert torch.equal(logits, expected) and torch.equal(pages, expected_pages)
    starts = batch.row_start.tolist()
    for row, (first, last) in enumerate(pairwise(starts)):
        tokens = slice(first, last)
        alone = dataclasses.replace(
            batch,
            token_ids=batch.token_ids[tokens],
            positions=batch.positions[tokens],
            row_start=torch.tensor([0, last - first], dtype=torch.int32),
            kv_len=batch.kv_len[row : row + 1],
            page_table=batch.page_table[row : row + 1],
            slots=batch.slots[tokens],
            logits_at=torch.arange(last - first),
        )
        with torch.inference_mode():
            assert torch.equal(outcome(decoder, alone, in_one_call=True)[0], logits[tokens])


def test_machine_code_does_what_the_model_does(model):
    """Encodings, addresses, the shapes in memory: at every tile instruction the processor stops, and the model steps in."""
    if "amx_bf16" in read_machine().isa:
        pytest.skip("this processor does not stop there")
    done = subprocess.run([sys.executable, "-m", "tests.ops.cpu.amx_traps"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
def test_only_the_kernels_of_amx_hold_its_instructions(best_isa):
    """A processor without them must never meet one."""
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(build())], capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, set[str]] = {}
    symbol = ""
    for line in listing.splitlines():
        if line.endswith(">:"):
            symbol = line.split("<")[1]
        elif match := re.search(r"\t(ldtilecfg|sttilecfg|tile\w+|tdp\w+)", line):
            found.setdefault(match[1], set()).add(symbol)
    places = set().union(*found.values())
    assert places and all("kilat3amx" in place for place in places)
    products = {"tdpbf16ps", "tdpbsud"}
    assert set(found) == {"ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored"} | products
