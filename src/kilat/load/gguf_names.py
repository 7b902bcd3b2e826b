"""GGUF tensor names and row orders as those of Hugging Face checkpoints. Source: the converter in the llama.cpp repository."""

import re
from types import MappingProxyType
from typing import Final

_TOP: Final = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
        # Frequency divisors of Llama 3.x; the config carries them as parameters too.
        "rope_freqs.weight": "rope_freqs.weight",
    }
)
_LAYER: Final = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_PATTERN: Final = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)", re.ASCII)


def hf_name(gguf_name: str) -> str | None:
    """Hugging Face name of a tensor of a dense Llama or Qwen model, or None when it has none."""
    match = _PATTERN.fullmatch(gguf_name)
    if match is None:
        return _TOP.get(gguf_name)
    part = _LAYER.get(match[2])
    return part and f"model.layers.{match[1]}.{part}.{match[3]}"


def rotary_heads(gguf_name: str, architecture: str, n_heads: int, n_kv_heads: int) -> int:
    """Number of heads whose rows must be put back into Hugging Face order; 0 when the rows are in order.

    Architecture ``llama`` stores the rows of each q and k head as pairs that rotate together (2 i, 2 i + 1); Hugging Face
    rotates row i with row i + head_dim / 2. The Qwen architectures keep Hugging Face order.
    """
    match = _PATTERN.fullmatch(gguf_name)
    if architecture != "llama" or match is None:
        return 0
    return {"attn_q": n_heads, "attn_k": n_kv_heads}.get(match[2], 0)
