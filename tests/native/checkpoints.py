"""Tiny random checkpoints on disk: safetensors directories of every architecture, and GGUF files in every block format."""

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from tokenizers import pre_tokenizers

from tests.models import tiny

# ggml type -> name; the K formats have no writer in Python, so their blocks are made of random bytes with small scales
SIMPLE = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "BF16": 30}
K_FORMATS = {"Q4_K": (12, 144, (0, 2)), "Q5_K": (13, 176, (0, 2)), "Q6_K": (14, 210, (208,))}
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCAB = 256, 512, 2, 4, 2, 300


def save(name: str, folder: Path, dtype=torch.float32, **changes) -> Path:
    """A transformers checkpoint of ``tests.models.tiny``'s architecture ``name`` in ``folder``."""
    model = tiny.transformers_model(name, **changes).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder)
    return folder


def byte_tokens() -> list[str]:
    """256 byte tokens of the byte-level alphabet, then control tokens up to VOCAB."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*alphabet, *(f"<|{i}|>" for i in range(VOCAB - len(alphabet)))]


def blocks(rng: np.random.Generator, format_name: str, rows: int, cols: int) -> np.ndarray:
    """Random weights of about 0.1 as stored bytes [rows, row bytes]."""
    if format_name in K_FORMATS:
        _, block_bytes, halves = K_FORMATS[format_name]
        raw = rng.integers(0, 256, (rows, cols // 256, block_bytes), dtype=np.uint8)
        for at in halves:
            scale = rng.uniform(0.5e-4, 2e-4, raw.shape[:2]).astype(np.float16)
            raw[..., at : at + 2] = scale[..., None].view(np.uint8).reshape(*raw.shape[:2], 2)
        return raw.reshape(rows, -1)
    values = rng.standard_normal((rows, cols)).astype(np.float32) * 0.1
    return quantize(values, gguf.GGMLQuantizationType(SIMPLE[format_name])).view(np.uint8).reshape(rows, -1)


def write_gguf(path: Path, architecture: str, formats: dict[str, str], *, tied: bool = False) -> Path:
    """A GGUF model; ``formats`` maps a part of a tensor's name to its format, "" is the default."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, architecture)
    head = HIDDEN // HEADS
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if architecture == "qwen3":
        writer.add_key_length(head)
        writer.add_value_length(head)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if architecture.startswith("qwen") else "smollm")
    writer.add_token_list(byte_tokens())
    writer.add_token_types([1] * 256 + [3] * (VOCAB - 256))
    writer.add_token_merges([])
    writer.add_eos_token_id(VOCAB - 1)

    def matrix(name: str, rows: int, cols: int) -> None:
        format_name = next((f for part, f in formats.items() if part and part in name), formats[""])
        kind = K_FORMATS[format_name][0] if format_name in K_FORMATS else SIMPLE[format_name]
        raw = blocks(rng, format_name, rows, cols)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType(kind))

    def vector(name: str, n: int) -> None:
        writer.add_tensor(name, (rng.standard_normal(n) * 0.2 + 1).astype(np.float32))

    matrix("token_embd.weight", VOCAB, HIDDEN)
    vector("output_norm.weight", HIDDEN)
    if not tied:
        matrix("output.weight", VOCAB, HIDDEN)
    for i in range(LAYERS):
        at = f"blk.{i}."
        vector(f"{at}attn_norm.weight", HIDDEN)
        vector(f"{at}ffn_norm.weight", HIDDEN)
        for part, rows, cols in (
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", KV_HEADS * head, HIDDEN),
            ("attn_v", KV_HEADS * head, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", INNER, HIDDEN),
            ("ffn_up", INNER, HIDDEN),
            ("ffn_down", HIDDEN, INNER),
        ):
            matrix(f"{at}{part}.weight", rows, cols)
            if architecture == "qwen2" and part in ("attn_q", "attn_k", "attn_v"):
                vector(f"{at}{part}.bias", rows)
        if architecture == "qwen3":
            vector(f"{at}attn_q_norm.weight", head)
            vector(f"{at}attn_k_norm.weight", head)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
