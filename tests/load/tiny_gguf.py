"""A GGUF model of two layers with known numbers, complete enough to be read as a real one."""

import struct

import numpy as np

from tests.base.gguf_bytes import BOOL, F32, STRING, U32, GgufBytes, Tensor, array, scalar

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS, VOCAB = 32, 4, 2, 8, 64, 2, 8
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "c", "d", "e"]


def shapes(architecture: str, *, tied: bool = False) -> dict[str, tuple[int, ...]]:
    """GGUF name -> shape, rows first, of every tensor of a model."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    if not tied:
        found["output.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (q, HIDDEN),
            "attn_k.weight": (kv, HIDDEN),
            "attn_v.weight": (kv, HIDDEN),
            "attn_output.weight": (HIDDEN, q),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (INNER, HIDDEN),
            "ffn_up.weight": (INNER, HIDDEN),
            "ffn_down.weight": (HIDDEN, INNER),
        }
        if architecture == "qwen2":
            layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if architecture == "qwen3":
            layer |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
        found |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return found


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The numbers stored in a tensor, drawn from its name."""
    return np.random.default_rng(list(name.encode())).standard_normal(shape).astype(np.float32)


def f32_tensor(name: str, content: np.ndarray) -> Tensor:
    return Tensor(name, tuple(reversed(content.shape)), 0, content.astype("<f4").tobytes())


def tiny_gguf(architecture: str = "llama", *, tied: bool = False, tokens: list[str] = TOKENS) -> GgufBytes:
    """The model as a file in the making: tests change ``keys`` and ``tensors`` before they build it."""
    a = architecture
    keys = {
        "general.architecture": scalar(STRING, a),
        "general.type": scalar(STRING, "model"),
        f"{a}.block_count": scalar(U32, LAYERS),
        f"{a}.context_length": scalar(U32, 512),
        f"{a}.embedding_length": scalar(U32, HIDDEN),
        f"{a}.feed_forward_length": scalar(U32, INNER),
        f"{a}.attention.head_count": scalar(U32, HEADS),
        f"{a}.attention.head_count_kv": scalar(U32, KV_HEADS),
        f"{a}.attention.layer_norm_rms_epsilon": scalar(F32, 2.0**-17),
        f"{a}.rope.freq_base": scalar(F32, 5e5),
        "tokenizer.ggml.tokens": array(STRING, tokens),
        "tokenizer.ggml.eos_token_id": scalar(U32, 2),
        "tokenizer.ggml.bos_token_id": scalar(U32, 1),
        "tokenizer.ggml.add_bos_token": scalar(BOOL, 0),
    }
    tensors = [f32_tensor(name, values(name, shape)) for name, shape in shapes(a, tied=tied).items()]
    return GgufBytes(list(keys.items()), tensors)


def with_key(file: GgufBytes, key: str, value: bytes | None) -> GgufBytes:
    """``file`` with one key replaced, added, or (None) left out."""
    file.keys = [(k, v) for k, v in file.keys if k != key]
    if value is not None:
        file.keys.append((key, value))
    return file


def rope_factors(factor: float, *, low: float = 1.0, high: float = 4.0, context: int = 8192) -> list[float]:
    """Frequency divisors as the Llama 3.1 reference code defines them, by cases on the wavelength."""
    found = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * np.pi * 5e5 ** (i / HEAD_DIM)
        if wavelength < context / high:
            found.append(1.0)
        elif wavelength > context / low:
            found.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


def rope_tensor(factors: list[float]) -> Tensor:
    return Tensor("rope_freqs.weight", (len(factors),), 0, struct.pack(f"<{len(factors)}f", *factors))
