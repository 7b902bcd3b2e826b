"""A whole model on disk, tiny and random: config, float32 weights, byte tokenizer, chat template. Written
without torch.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.cluster.tiny_model import write_tiny_model

CONFIG = {
    "model_type": "llama",
    "torch_dtype": "float32",
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 257,
}
# one table, two layers of (2 norms, q, k, v, o, gate, up, down), one norm
PARAMETERS = 259 * 64 + 2 * (2 * 64 + 64 * 64 * 2 + 32 * 64 * 2 + 96 * 64 * 3) + 64


def write_model(folder: Path, **config: object) -> Path:
    """Write the model into ``folder`` and return it; ``config`` replaces fields of its config.json."""
    write_tiny_model(folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    draw = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (259, 64), "model.norm.weight": (64,)}
    for i in range(2):
        name = f"model.layers.{i}"
        shapes |= {f"{name}.{n}.weight": (64,) for n in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{name}.self_attn.{n}_proj.weight": (64, 64) for n in "qo"}
        shapes |= {f"{name}.self_attn.{n}_proj.weight": (32, 64) for n in "kv"}
        shapes |= {f"{name}.mlp.{n}_proj.weight": (96, 64) for n in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj.weight"] = (64, 96)
    save_file(
        {name: (draw.standard_normal(shape) * 0.2).astype(np.float32) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    return folder
