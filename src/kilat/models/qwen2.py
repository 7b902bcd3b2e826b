"""Qwen2 and Qwen2.5 dense models; ``model_type`` qwen2: biases on q, k and v. Source: arXiv:2407.10671."""

from collections.abc import Mapping

from kilat.models.config_read import ConfigReader
from kilat.nn.attention import AttentionConfig
from kilat.nn.decoder import DecoderConfig


def read_config(raw: Mapping[str, object]) -> DecoderConfig:
    """Everything the decoder needs from a Qwen2 config; raises ConfigError for what it cannot honour."""
    r = ConfigReader(raw)
    hidden, n_q = r.positive("hidden_size"), r.positive("num_attention_heads")
    max_positions = r.positive("max_position_embeddings", 32_768)
    n_layers = r.positive("num_hidden_layers", limit=4096)
    r.must_be("hidden_act", "silu")
    windows = r.layer_windows(n_layers)
    n_kv, head_dim = r.positive("num_key_value_heads", n_q), r.positive("head_dim", hidden // n_q)
    config = DecoderConfig(
        vocab_size=r.positive("vocab_size"),
        hidden=hidden,
        inner=r.positive("intermediate_size"),
        norm_eps=r.get(float, "rms_norm_eps", 1e-6),
        rope=r.rope(head_dim, 10_000.0, max_positions),
        attention=[AttentionConfig(hidden, n_q, n_kv, head_dim, qkv_bias=True, window=w) for w in windows],
        mlp_bias=False,
        tied=r.get(bool, "tie_word_embeddings", False),
        max_positions=max_positions,
    )
    r.finish()
    return config
