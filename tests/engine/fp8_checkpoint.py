"""A small random model on disk, as bf16 and as the FP8 blocks that quantizing it gives."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from kilat.ops.fp8_linear import quantize_weight

CONFIG = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 96,
}
FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def tensors(config: dict[str, object]) -> dict[str, torch.Tensor]:
    """Weights of a model of ``config``; every linear weight has rows and columns of very different sizes."""
    g = torch.Generator().manual_seed(11)
    c = {k: v for k, v in config.items() if isinstance(v, int)}
    h, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    n_q, n_kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    shapes = {"model.embed_tokens": (c["vocab_size"], h), "lm_head": (c["vocab_size"], h)}
    ones = ["model.norm"]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}"
        ones += [f"{p}.input_layernorm", f"{p}.post_attention_layernorm"]
        shapes |= {f"{p}.self_attn.{n}_proj": (rows, h) for n, rows in (("q", n_q), ("k", n_kv), ("v", n_kv))}
        shapes |= {f"{p}.self_attn.o_proj": (h, n_q), f"{p}.mlp.down_proj": (h, inner)}
        shapes |= {f"{p}.mlp.{n}_proj": (inner, h) for n in ("gate", "up")}
    found = {f"{n}.weight": torch.randn(s, generator=g).mul(0.1).bfloat16() for n, s in shapes.items()}
    return found | {f"{n}.weight": torch.ones(h, dtype=torch.bfloat16) for n in ones}


def write(folder: Path, *, fp8: bool, more: dict[str, torch.Tensor] | None = None, **config: object) -> Path:
    """Write the model into ``folder`` and return it. ``fp8``: with its linear weights of layers in blocks; ``more`` tensors beside."""
    folder.mkdir()
    whole = {**CONFIG, **({"quantization_config": FP8_CONFIG} if fp8 else {}), **config}
    (folder / "config.json").write_text(json.dumps(whole))
    found = tensors(whole) | (more or {})
    if fp8:
        for name in [n for n in found if n.endswith("_proj.weight")]:
            w = quantize_weight(found[name])
            found |= {name: w.data, f"{name}_scale_inv": w.scale}
    save_file(found, folder / "model.safetensors")
    return folder
