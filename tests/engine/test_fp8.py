"""Engines with FP8 weights and FP8 pages: what they load, what they refuse, what they say, and the same tokens whatever happens."""

import json

import pytest
import torch
from safetensors.torch import load_file

from kilat.base.errors import ConfigError, ModelFileError
from kilat.engine.build import build_engine
from kilat.engine.config import EngineConfig
from kilat.engine.core import Engine
from kilat.engine.kv_scales import HEADROOM
from kilat.ops.cpu import kernels as cpu_kernels
from kilat.ops.fp8_linear import FP8, FP8_MAX, dequantize
from tests.engine import fp8_checkpoint
from tests.engine.harness import record, run

pytestmark = pytest.mark.cpu
PROMPTS = [[5, 9, 12], list(range(40)), [7] * 20, list(range(60, 5, -2)), list(range(40))]


@pytest.fixture
def engine():
    """Builds an engine over a model directory and closes it after the test."""
    built: list[Engine] = []

    def build(folder, **options) -> Engine:
        base = {"kernels": "reference", "threads": 1, "kv_cache_bytes": 1 << 20, "max_num_seqs": 4}
        config = EngineConfig(str(folder), "hf", "tiny", **{**base, **options})
        built.append(build_engine(config))
        return built[-1]

    yield build
    for e in built:
        e.close()


def ids(e: Engine, prompts=PROMPTS) -> dict[str, list[int]]:
    return run(e, [record(str(i), p, temperature=0.7 * (i % 2)) for i, p in enumerate(prompts)])


def linears(e: Engine):
    return [
        w
        for a in e.runner.model.layers
        for w in (a.attention.qkv, a.attention.out.weight, a.mlp.gate_up, a.mlp.down.weight)
    ]


def test_stored_blocks_and_blocks_quantized_while_loading_give_the_same_tokens(engine, tmp_path):
    stored = engine(fp8_checkpoint.write(tmp_path / "fp8", fp8=True))
    quantized = engine(fp8_checkpoint.write(tmp_path / "bf16", fp8=False), quant="fp8")
    for a, b in zip(linears(stored), linears(quantized)):
        assert torch.equal(a.data.data.view(torch.uint8), b.data.data.view(torch.uint8))
        assert torch.equal(a.data.scale, b.data.scale)
    assert stored.info.ledger_bytes == quantized.info.ledger_bytes
    assert stored.info.kernels == quantized.info.kernels == "torch-reference: asked for; FP8 weights"
    assert ids(stored) == ids(quantized)


def test_fp8_weights_take_half_the_bytes_of_the_layers(engine, tmp_path):
    folder = fp8_checkpoint.write(tmp_path / "m", fp8=False)
    bf16, fp8 = (engine(folder, quant=q).info.ledger_bytes["weights"] for q in ("none", "fp8"))
    values = sum(t.numel() for n, t in load_file(folder / "model.safetensors").items() if "_proj" in n)
    assert bf16 - fp8 == values - 4 * values // 128**2


def test_fp8_checkpoint_can_be_taken_back_to_bf16(engine, tmp_path):
    folder = fp8_checkpoint.write(tmp_path / "m", fp8=True)
    e = engine(folder, quant="none")
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    scale = stored[f"{name}_scale_inv"].repeat_interleave(128, 1)
    expected = (stored[name].float() * scale).bfloat16()
    assert torch.equal(e.runner.model.layers[1].mlp.down.weight.data, expected)
    assert "FP8" not in e.info.kernels


def test_blocks_that_do_not_fit_the_fusion_are_quantized_anew_and_the_engine_says_so(engine, tmp_path):
    narrow = {"head_dim": 32}  # k and v have 64 rows: half a block
    stored = engine(fp8_checkpoint.write(tmp_path / "fp8", fp8=True, **narrow))
    assert "FP8 weights; 6 weights quantized anew" in stored.info.kernels
    assert len(ids(stored)) == len(PROMPTS)


@pytest.mark.skipif(not cpu_kernels.available()[0], reason="no native kernels here")
def test_set_without_fp8_product_serves_the_dequantized_weights_and_says_so(engine, tmp_path):
    folder = fp8_checkpoint.write(tmp_path / "m", fp8=True)
    e = engine(folder, kernels="cpu")
    assert "FP8 weights dequantized to torch.bfloat16 while loading" in e.info.kernels
    assert e.info.ledger_bytes["weights"] > 1.5 * engine(folder).info.ledger_bytes["weights"]
    assert len(ids(e)) == len(PROMPTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq', supported: 'fp8'"),
        ({"weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\], supported: \[128, 128\]"),
    ],
)
def test_other_quantized_checkpoint_is_refused_with_a_way_out(engine, tmp_path, change, message):
    quantization = {**fp8_checkpoint.FP8_CONFIG, **change}
    folder = fp8_checkpoint.write(tmp_path / "m", fp8=True, quantization_config=quantization)
    with pytest.raises(ConfigError, match=message):
        engine(folder)


@pytest.mark.parametrize("options", [{"quant": "int4"}, {"kv_dtype": "fp4"}])
def test_unknown_format_is_refused_with_those_that_are_known(options):
    with pytest.raises(ConfigError, match=r"use one of auto, .*fp8"):
        EngineConfig("", "hf", "m", **options)


def test_engines_of_different_formats_never_share_names_of_pages(engine, tmp_path):
    folder = fp8_checkpoint.write(tmp_path / "m", fp8=False)
    options = [
        {},
        {"quant": "fp8"},
        {"kv_dtype": "fp8"},
        {"quant": "fp8", "kv_dtype": "fp8"},
        {"page_tokens": 8},
    ]
    names = [engine(folder, **o).pages.layout.model for o in options]
    assert len(set(names)) == len(options)
    assert engine(folder, kv_dtype="fp8").pages.layout.model == names[2]


def test_fp8_pages_take_half_the_bytes(engine, tmp_path):
    folder = fp8_checkpoint.write(tmp_path / "m", fp8=False)
    plain, packed = engine(folder), engine(folder, kv_dtype="fp8")
    assert packed.pages.kv.dtype == FP8
    assert packed.info.n_pages == 2 * plain.info.n_pages
    assert "FP8 pages" in packed.info.kernels


def test_tokens_over_fp8_pages_depend_on_no_batch_chunk_or_cache(engine, tmp_path):
    folder = fp8_checkpoint.write(tmp_path / "m", fp8=False)
    together = ids(engine(folder, kv_dtype="fp8", max_step_tokens=16))
    alone = engine(folder, kv_dtype="fp8")
    for i, prompt in enumerate(PROMPTS):
        assert run(alone, [record(str(i), prompt, temperature=0.7 * (i % 2))])[str(i)] == together[str(i)]


def test_measured_scales_leave_the_room_they_promise(engine, tmp_path):
    folder = fp8_checkpoint.write(tmp_path / "m", fp8=False)
    e = engine(folder, kv_dtype="fp8")
    assert len(ids(e)) == len(PROMPTS)
    top = e.pages.kv.float().abs().amax((0, 3, 5))
    # powers of two: at most twice the room, and the text of the test may differ from what was measured by some
    assert (top < FP8_MAX).all() and (top > FP8_MAX / HEADROOM / 8).all()
    scale = e.runner.model.layers[0].attention.kv_scale
    assert torch.equal(torch.exp2(torch.log2(scale.k).round()), scale.k)


@pytest.mark.parametrize("form", ["self_attn.{}_scale", "self_attn.{0}_proj.{0}_scale"])
def test_scales_of_the_checkpoint_are_taken(engine, tmp_path, form):
    more = {}
    for i in range(2):
        more[f"model.layers.{i}." + form.format("k")] = torch.tensor(0.25 + i)
        more[f"model.layers.{i}." + form.format("v")] = torch.tensor([0.5, 2.0])
    e = engine(fp8_checkpoint.write(tmp_path / "m", fp8=False, more=more), kv_dtype="fp8")
    scales = [layer.attention.kv_scale for layer in e.runner.model.layers]
    assert [s.k.tolist() for s in scales] == [[0.25, 0.25], [1.25, 1.25]]
    assert [s.v.tolist() for s in scales] == [[0.5, 2.0]] * 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"k_scale": torch.tensor(1.0), "v_scale": torch.tensor(0.0)},
            "expected 1 or 2 finite numbers above 0",
        ),
        ({"k_scale": torch.ones(3), "v_scale": torch.tensor(1.0)}, "expected 1 or 2"),
        ({"k_scale": torch.tensor(1.0), "v_scale": torch.tensor(1.0)}, "2 of 4 scales"),
        ({"k_scale": torch.tensor(1.0)}, "1 of 4 scales"),
    ],
)
def test_bad_scales_of_a_checkpoint_are_refused(engine, tmp_path, more, message):
    named = {f"model.layers.0.self_attn.{k}": v for k, v in more.items()}
    folder = fp8_checkpoint.write(tmp_path / "m", fp8=False, more=named)
    with pytest.raises(ModelFileError, match=message):
        engine(folder, kv_dtype="fp8")
    assert engine(folder).info.dtype == "bfloat16"


def test_model_whose_keys_are_not_finite_gets_no_scales(engine, tmp_path):
    broken = {
        "model.layers.1.self_attn.k_proj.weight": torch.full((128, 128), torch.nan, dtype=torch.bfloat16)
    }
    folder = fp8_checkpoint.write(tmp_path / "m", fp8=False, more=broken)
    with pytest.raises(ModelFileError, match="not finite"):
        engine(folder, kv_dtype="fp8")


def test_fp8_pages_are_refused_where_keys_have_a_bias(engine, tmp_path):
    folder = fp8_checkpoint.write(tmp_path / "m", fp8=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    with pytest.raises(ConfigError, match=r"adds a bias to its keys.*use kv_dtype auto"):
        engine(folder, kv_dtype="fp8")


@pytest.mark.skipif(not cpu_kernels.available()[0], reason="no native kernels here")
def test_fp8_pages_are_refused_by_a_set_that_cannot_read_them(engine, tmp_path):
    with pytest.raises(
        ConfigError, match=r"kernel set cpu-.* cannot read; use --device cuda, --kernels reference"
    ):
        engine(fp8_checkpoint.write(tmp_path / "m", fp8=False), kernels="cpu", kv_dtype="fp8")


def test_dummy_weights_are_fp8_too(engine, tmp_path):
    folder = fp8_checkpoint.write(tmp_path / "m", fp8=True)
    e = engine(folder, dummy_weights=True, kv_dtype="fp8")
    assert all(w.data.data.dtype == FP8 for w in linears(e))
    assert 0.01 < float(dequantize(linears(e)[0].data, torch.float32).std()) < 0.04
    assert len(ids(e)) == len(PROMPTS)
