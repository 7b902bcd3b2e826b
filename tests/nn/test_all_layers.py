"""All layers in one native call: to the bit what the ops give one after the other, for every architecture and mix of rows."""

import dataclasses

import pytest
import torch

from kilat.base.errors import EngineError
from kilat.nn.decoder import Decoder
from kilat.ops.cpu.kernels import available, cpu_kernels
from tests.models import tiny
from tests.ops.cpu.cases import Shape, step

pytestmark = pytest.mark.cpu
NAMES = list(tiny.configs())


@pytest.fixture(scope="module")
def kernels():
    usable, why = available()
    if not usable:
        pytest.skip(why)
    return cpu_kernels(2)


def model_of(name: str, kernels, dtype: torch.dtype, **shape) -> Decoder:
    return tiny.kilat_model(tiny.transformers_model(name, **shape), kernels, dtype)


def mixed_step(model: Decoder):
    """Rows that decode beside chunks of prompts, one of them the start of its session."""
    a = model.layers[0].attention.heads
    counts, lengths = [1, 7, 1, 12, 1], [40, 7, 1, 60, 33]
    batch = step(counts, lengths, Shape(a.n_q, a.n_kv, a.dim, 8))
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (sum(counts),), generator=g, dtype=torch.int32)
    return dataclasses.replace(batch, token_ids=ids, logits_at=torch.arange(sum(counts)))


def outcome(model: Decoder, batch, *, in_one_call: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, pool afterwards)."""
    n_pages = int(batch.page_table.max()) + 1
    kv = tiny.pool(model, n_pages, batch.page_tokens, model.embedding.dtype)
    kv.copy_(torch.randn(kv.shape, generator=torch.Generator().manual_seed(2)))
    kept = model.all_layers
    assert kept is not None
    model.all_layers = kept if in_one_call else None
    with torch.inference_mode():
        logits = model(batch, kv)
    model.all_layers = kept
    return logits, kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_one_call_gives_the_bits_of_the_ops_one_by_one(name, dtype, kernels):
    model = model_of(name, kernels, dtype)
    batch = mixed_step(model)
    logits, pages = outcome(model, batch, in_one_call=True)
    expected, expected_pages = outcome(model, batch, in_one_call=False)
    assert torch.equal(logits, expected) and torch.equal(pages, expected_pages)
    assert torch.isfinite(logits).all() and logits.float().std() > 0


@pytest.mark.parametrize("places", [[0, 7, 8, 20, 21], [0, 8, 20], [20], [], [0, 3, 4, 7, 8]], ids=str)
def test_only_tokens_whose_logits_are_asked_for_leave_the_last_layer(places, kernels):
    model = model_of("qwen3", kernels, torch.bfloat16)
    batch = dataclasses.replace(mixed_step(model), logits_at=torch.tensor(places, dtype=torch.int32))
    logits, pages = outcome(model, batch, in_one_call=True)
    expected, expected_pages = outcome(model, batch, in_one_call=False)
    assert logits.shape == (len(places), model.config.vocab_size)
    assert torch.equal(logits, expected) and torch.equal(pages, expected_pages)


@pytest.mark.parametrize(
    "counts",
    [[4, 2, 0, 0, 0, 0], [1, 5, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0], [0, 6, 0, 0, 0, 0], [0, 6, 0], [4, 2, 0]],
    ids=str,
)
def test_a_step_filled_up_with_empty_rows_has_the_logits_of_the_real_ones(counts, kernels):
    model = model_of("llama", kernels, torch.bfloat16)
    heads = model.layers[0].attention.heads
    batch = step(counts, [9, 7, 1, 1, 1, 1][: len(counts)], Shape(heads.n_q, heads.n_kv, heads.dim, 8))
    last = [i for i in (counts[0] - 1, sum(counts) - 1) if i >= 0]
    batch = dataclasses.replace(
        batch,
        token_ids=torch.arange(1, 7, dtype=torch.int32),
        logits_at=torch.tensor((last + [0] * 6)[: len(counts)], dtype=torch.int32),
    )
    logits, _ = outcome(model, batch, in_one_call=True)
    expected, _ = outcome(model, batch, in_one_call=False)
    assert torch.equal(logits, expected)


def test_rows_that_decode_but_do_not_sample_have_no_logits(kernels):
    model = model_of("llama", kernels, torch.bfloat16)
    heads = model.layers[0].attention.heads
    batch = step([1, 1, 1], [9, 1, 17], Shape(heads.n_q, heads.n_kv, heads.dim, 8))
    for places in ([0, 1, 2], [1]):
        asked = dataclasses.replace(
            batch,
            token_ids=torch.tensor([1, 2, 3], dtype=torch.int32),
            logits_at=torch.tensor(places, dtype=torch.int32),
        )
        assert torch.equal(
            outcome(model, asked, in_one_call=True)[0], outcome(model, asked, in_one_call=False)[0]
        )


def test_gate_that_the_kernels_fuse_is_the_same_too(kernels):
    model = model_of("llama", kernels, torch.bfloat16, intermediate_size=128)
    batch = mixed_step(model)
    assert torch.equal(
        outcome(model, batch, in_one_call=True)[0], outcome(model, batch, in_one_call=False)[0]
    )


def test_pool_of_other_layers_or_another_dtype_is_refused(kernels):
    model = model_of("llama", kernels, torch.bfloat16)
    batch = mixed_step(model)
    kv = tiny.pool(model, int(batch.page_table.max()) + 1, batch.page_tokens, torch.bfloat16)
    for wrong in (kv[:, :2], kv.float()):
        with pytest.raises(EngineError, match="page pool"):
            model(batch, wrong)


def test_layers_of_different_shapes_are_refused(kernels):
    model = model_of("llama", kernels, torch.float32)
    other = model_of("llama", kernels, torch.float32, intermediate_size=128)
    with pytest.raises(EngineError, match="different shapes"):
        kernels.bind_layers([model.layers[0].weights(), other.layers[0].weights()], 1e-6)
