"""GGUF metadata as a Hugging Face style config. A field of the architecture that is not translated is refused, not skipped."""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

from kilat.base.errors import ModelFileError
from kilat.base.gguf_header import GgufHeader

T = TypeVar("T", int, float, bool, str)

ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
ROPE_FACTORS: Final = "rope_freqs.weight"
# Tokens that end a turn or a text, by the names that model families give them.
END_TOKENS: Final = frozenset(
    "<|im_end|> <|endoftext|> <|eot_id|> <|eom_id|> <|end_of_text|> <|end|> <|eot|> <end_of_turn> </s>".split()
)
MAX_DIM: Final = 1 << 24
MAX_LAYERS: Final = 4096


class _Fields:
    """Reads the metadata of one architecture, checks types and ranges, remembers what was read."""

    def __init__(self, metadata: Mapping[str, object], file_name: str) -> None:
        self.metadata = metadata
        self.file_name = file_name
        architecture = metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise self.error(
                f"general.architecture is {architecture!r}; supported: {', '.join(ARCHITECTURES)}"
            )
        self.architecture = str(architecture)
        self.seen: set[str] = set()

    def error(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.file_name}: {message}")

    def get(self, kind: type[T], name: str, default: T | None = None) -> T:
        """Field ``<architecture>.<name>``; raises ModelFileError when it has another type, or is absent without a default."""
        key = f"{self.architecture}.{name}"
        self.seen.add(key)
        value = self.metadata.get(key, default)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if value is None:
            raise self.error(f"metadata has no {key!r}: the file is incomplete, convert the model again")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            shown = f"a list of {len(value)}" if isinstance(value, list) else repr(value)
            raise self.error(f"{key} is {shown}, expected {kind.__name__}")
        return value

    def has(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self.metadata

    def size(self, name: str, default: int | None = None, limit: int = MAX_DIM) -> int:
        value = self.get(int, name, default)
        if not 1 <= value <= limit:
            raise self.error(f"{self.architecture}.{name} is {value}, allowed 1 to {limit}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(float, name, default)
        if not 0 < value < 1e30:
            raise self.error(
                f"{self.architecture}.{name} is {value}, expected a finite number greater than 0"
            )
        return value

    def must_be(self, name: str, wanted: int | bool) -> None:
        value = self.get(type(wanted), name, wanted)
        if value != wanted:
            raise self.error(
                f"{self.architecture}.{name} is {value}, only {wanted} is supported for this architecture"
            )

    def finish(self) -> None:
        """Refuse fields that nobody read, unless they are off: they may change what the model computes."""
        unknown = [
            key
            for key, value in self.metadata.items()
            if key.startswith(f"{self.architecture}.") and key not in self.seen and value
        ]
        if unknown:
            raise self.error(
                f"metadata has {', '.join(sorted(unknown)[:8])}, which may change the model's math and which this version does "
                "not know: use a newer kilat or another conversion of the model"
            )


def config_of(header: GgufHeader, path: Path) -> dict[str, object]:
    """Hugging Face style config of the GGUF file at ``path``; raises ModelFileError for what cannot be honoured."""
    fields = _Fields(header.metadata, path.name)
    _check_container(fields)
    hidden, n_heads = fields.size("embedding_length"), fields.size("attention.head_count")
    if not fields.has("attention.key_length") and hidden % n_heads:
        raise fields.error(f"embedding_length {hidden} is not a multiple of attention.head_count {n_heads}")
    head_dim = fields.size("attention.key_length", hidden // n_heads)
    theta = fields.number("rope.freq_base", 10_000.0)
    context = fields.size("context_length")
    config: dict[str, object] = {
        "model_type": fields.architecture,
        "vocab_size": _vocab_size(fields, header, hidden),
        "hidden_size": hidden,
        "intermediate_size": fields.size("feed_forward_length"),
        "num_hidden_layers": fields.size("block_count", limit=MAX_LAYERS),
        "num_attention_heads": n_heads,
        "num_key_value_heads": fields.size("attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "max_position_embeddings": context,
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    if fields.architecture != "qwen2":  # qwen2 always has biases on q, k and v
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if fields.architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    for name, wanted in (
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
        ("expert_count", 0),
        ("expert_used_count", 0),
        ("attention.causal", True),
    ):
        fields.must_be(name, wanted)
    window = fields.get(int, "attention.sliding_window", 0)
    if 0 < window < context:
        raise fields.error(
            f"attention.sliding_window is {window}, below the context of {context}: not supported in GGUF files, "
            "use the model's safetensors"
        )
    scaling = _metadata_scaling(fields, context) or _factor_scaling(fields, header, path, head_dim, theta)
    if scaling:
        config["rope_scaling"] = scaling
    fields.seen |= {f"{fields.architecture}.vocab_size", f"{fields.architecture}.tensor_data_layout"}
    fields.finish()
    return config


def _check_container(fields: _Fields) -> None:
    kind = fields.metadata.get("general.type", "model")
    if kind != "model":
        raise fields.error(f"holds a {kind!r}, not a model")
    n_parts = fields.metadata.get("split.count", 0)
    if n_parts not in (0, 1):
        raise fields.error(
            f"is one of {n_parts} parts of a split model: join them with llama-gguf-split --merge"
        )


def _vocab_size(fields: _Fields, header: GgufHeader, hidden: int) -> int:
    """Rows of the embedding; the metadata's vocabulary may be shorter, never longer."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise fields.error("has no tensor token_embd.weight: the file is incomplete")
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        raise fields.error(
            f"token_embd.weight has shape {list(embedding.shape)}, expected [vocabulary, {hidden}]"
        )
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
        raise fields.error(
            f"vocabulary has {len(tokens)} tokens, token_embd.weight only {embedding.shape[0]} rows"
        )
    return embedding.shape[0]


def _metadata_scaling(fields: _Fields, context: int) -> dict[str, object] | None:
    """``rope.scaling.*`` as Hugging Face ``rope_scaling``; None when positions are not scaled."""
    default = "linear" if fields.has("rope.scaling.factor") or fields.has("rope.scale_linear") else "none"
    kind = fields.get(str, "rope.scaling.type", default)
    fields.get(bool, "rope.scaling.finetuned", False)
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    original = fields.size("rope.scaling.original_context_length", context)
    if kind == "none" or factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise fields.error(f"rope.scaling.type is {kind!r}; supported: none, linear, yarn")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _factor_scaling(
    fields: _Fields, header: GgufHeader, path: Path, head_dim: int, theta: float
) -> dict[str, object] | None:
    """Llama 3.x files carry the divisor of each frequency as a tensor instead of the parameters it was computed from.

    The parameters are found again by computing the divisors of every published Llama 3.x model (low 1, high 4, context 8192,
    factor = the largest divisor) and comparing; other divisors are refused.
    """
    info = header.tensors.get(ROPE_FACTORS)
    if info is None:
        return None
    n = head_dim // 2
    if info.ggml_type != 0 or info.shape != (n,):
        raise fields.error(
            f"{ROPE_FACTORS} has type {info.ggml_type} and shape {list(info.shape)}, expected F32 of [{n}]"
        )
    with open(path, "rb") as file:
        file.seek(header.data_offset + info.offset)
        found = struct.unpack(f"<{n}f", file.read(4 * n))
    factor, low, high, context = max(found), 1.0, 4.0, 8192
    if not all(math.isfinite(f) and f >= 0.999 for f in found):
        raise fields.error(f"{ROPE_FACTORS} holds values below 1 or not finite: the file is damaged")
    if factor < 1.001:
        return None
    for i, divisor in enumerate(found):
        turns = context * theta ** (-2 * i / head_dim) / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        wanted = 1 / ((1 - kept) / factor + kept)
        if abs(divisor - wanted) > 1e-3 * wanted:
            raise fields.error(
                f"{ROPE_FACTORS}[{i}] is {divisor:.4f}, Llama 3 scaling by {factor:g} gives {wanted:.4f}: this scaling is not "
                "supported in GGUF files, use the model's safetensors"
            )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def context_length(header: GgufHeader, file_name: str) -> int:
    """Trained context in tokens; raises ModelFileError."""
    return _Fields(header.metadata, file_name).size("context_length")


def special_ids(header: GgufHeader, file_name: str) -> tuple[tuple[int, ...], int | None]:
    """(ids that end a text, id that starts one or None).

    An id ends a text when the metadata says so (eos, eot, eom), when the chat template writes its token and the token is known
    to end turns, or when it is the padding token and is known to end texts (Qwen pads with ``<|endoftext|>``).
    """
    metadata = header.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []

    def token_id(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(tokens):
            raise ModelFileError(
                f"{file_name}: tokenizer.ggml.{name}_token_id is {value!r}, the vocabulary has {len(tokens)} tokens"
            )
        return value

    found = [token_id(name) for name in ("eos", "eot", "eom")]
    padding = token_id("padding")
    if padding is not None and tokens[padding] in END_TOKENS:
        found.append(padding)
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        used = {token for token in END_TOKENS if token in template}
        found += [i for i, token in enumerate(tokens) if token in used]
    return tuple(dict.fromkeys(i for i in found if i is not None)), token_id("bos")
