"""The last layer for the wanted tokens alone: the logits and pages that it gives for all of them."""

import dataclasses

import pytest
import torch

from kilat.nn import wanted
from kilat.nn.attention import AttentionConfig
from kilat.nn.build import DummyBuild, NoWeights
from kilat.nn.decoder import Decoder, DecoderConfig
from kilat.nn.rotary import Rope
from kilat.nn.wanted import pays, wanted_rows
from kilat.ops import kernels
from kilat.ops.fp8_linear import FP8
from kilat.ops.rope_write import KvScale
from kilat.parallel.mesh import Mesh
from tests.ops.triton.steps import Shape, step

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")
COUNTS, LENGTHS = [1, 21, 0, 1, 30, 5], [40, 21, 0, 1, 70, 65]
WANTED = {
    "the last token of each row": [0, 21, 22, 52, 57],
    "none of some rows": [0, 52],
    "several of a row, in any order": [50, 0, 31, 32, 33, 57, 1],
    "filled up with the first": [21, 52, 0, 0],
    "none": [],
}


def model_of(*, dim=32, fp8=False, layers=2, window=0, ops=None) -> Decoder:
    torch.manual_seed(1)
    attention = AttentionConfig(64, 4, 2, dim, qkv_bias=True, window=window, qk_norm_eps=1e-6)
    rope = Rope(dim, 10_000.0, dim, {"type": "default"})
    config = DecoderConfig(50, 64, 96, 1e-6, rope, [attention] * layers, False, False, 128)
    build = DummyBuild(
        NoWeights(), Mesh(), ops or kernels.reference(), torch.float32, CPU, lambda n, b: None, fp8=fp8
    )
    return Decoder(build, config, 128)


def step_of(model: Decoder, at: list[int]):
    a = model.layers[0].attention.heads
    batch = step(COUNTS, LENGTHS, Shape(a.n_q, a.n_kv, a.dim, 8), CPU)
    ids = torch.randint(0, 50, (sum(COUNTS),), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    return dataclasses.replace(batch, token_ids=ids, logits_at=torch.tensor(at, dtype=torch.int32))


def outcome(model: Decoder, batch, dtype=torch.float32):
    """(logits, pool afterwards as fp32)."""
    a = model.layers[0].attention.heads
    n_pages = int(batch.page_table.max()) + 1
    kv = torch.randn(
        n_pages, len(model.layers), 2, 8, a.n_kv, a.dim, generator=torch.Generator().manual_seed(3)
    )
    kv = kv.to(dtype)
    with torch.inference_mode():
        logits = model(batch, kv)
    return logits, kv.float()


@pytest.fixture
def always(monkeypatch):
    """Small steps are computed so too; the number of last layers that were."""
    seen = []
    monkeypatch.setattr(wanted, "LEAST_TOKENS", 1)
    monkeypatch.setattr(wanted, "LEAST_SHARE", 1)
    rows = wanted.wanted_rows
    monkeypatch.setattr("kilat.nn.decoder.wanted_rows", lambda batch: seen.append(1) or rows(batch))
    return seen


@pytest.mark.parametrize("at", WANTED.values(), ids=WANTED.keys())
@pytest.mark.parametrize("model", [{}, {"layers": 1}, {"window": 20}, {"dim": 64, "fp8": True}], ids=str)
def test_logits_and_pages_have_the_bits_of_the_whole_layer(at, model, always, monkeypatch):
    decoder = model_of(**model)
    batch = step_of(decoder, at)
    logits, pages = outcome(decoder, batch)
    n_short = 1 if at else 0  # where no token is wanted there is nothing to compute but keys and values
    assert len(always) == n_short
    monkeypatch.setattr(wanted, "LEAST_TOKENS", 1000)
    expected, expected_pages = outcome(decoder, batch)
    assert len(always) == n_short
    assert torch.equal(logits, expected) and logits.shape == (len(at), 50)
    assert torch.equal(pages, expected_pages)
    assert logits.isfinite().all() and (len(at) == 0 or logits.std() > 0)


def test_pages_of_e4m3_are_written_and_read_the_same(always, monkeypatch):
    decoder = model_of()
    decoder.scale_kv([KvScale(torch.tensor([0.5, 0.25]), torch.tensor([0.125, 2.0]))] * 2)
    batch = step_of(decoder, WANTED["none of some rows"])
    logits, pages = outcome(decoder, batch, FP8)
    monkeypatch.setattr(wanted, "LEAST_TOKENS", 1000)
    expected, expected_pages = outcome(decoder, batch, FP8)
    assert torch.equal(logits, expected) and torch.equal(pages, expected_pages) and len(always) == 1


@pytest.mark.parametrize("case", ["blocks that would be cut", "a set that cannot cut"])
def test_weights_without_parts_take_the_whole_layer(case, always):
    if case == "a set that cannot cut":
        decoder = model_of(ops=dataclasses.replace(kernels.reference(), cut_linear=None))
    else:
        decoder = model_of(dim=24, fp8=True)
    logits, _ = outcome(decoder, step_of(decoder, [0, 52]))
    assert logits.shape == (2, 50) and always == []


def test_parts_are_views_of_the_fused_weight():
    for model in (model_of(), model_of(dim=64, fp8=True)):
        a = model.layers[-1].attention
        whole = a.qkv.data if a.qkv.dtype == torch.float32 else a.qkv.data.data
        for part in a.parts:
            data = part.data if part.dtype == torch.float32 else part.data.data
            assert data.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_wanted_token_is_a_row_that_ends_with_it():
    batch = step_of(model_of(), [22, 31, 57])
    rows = wanted_rows(batch)
    assert rows.kv_len.tolist() == [1, 49, 65] and rows.row_start.tolist() == [0, 1, 2, 3]
    assert torch.equal(rows.page_table, batch.page_table[[3, 4, 5]])
    assert rows.max_q_len == 1 and rows.logits_at is None
    fields = (rows.token_ids, rows.positions, rows.row_start, rows.kv_len, rows.page_table, rows.slots)
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in fields)


def shapes(n_tokens: int, n_rows: int, n_wanted: int | None):
    batch = step([1], [1], Shape(), CPU)
    return dataclasses.replace(
        batch,
        token_ids=torch.zeros(n_tokens),
        kv_len=torch.zeros(n_rows),
        logits_at=None if n_wanted is None else torch.zeros(n_wanted),
    )


def test_only_long_steps_with_few_wanted_tokens_take_them_alone():
    assert pays(shapes(8192, 1, 1)) and pays(shapes(8192, 1, 0)) and pays(shapes(512, 64, 64))
    assert not pays(shapes(256, 1, 1))
    assert not pays(shapes(512, 128, 128))
    assert not pays(shapes(8192, 1024, None))
    # prompt log-probabilities of a long row: each token would read all its keys alone
    assert not pays(shapes(8192, 2, 1000))
