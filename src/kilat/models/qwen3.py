"""Qwen3 dense models; ``model_type`` qwen3: an RMS norm on every query and key head, no biases by default. Source: arXiv:2505.09388."""

from collections.abc import Mapping

from kilat.models.config_read import ConfigReader
from kilat.nn.attention import AttentionConfig
from kilat.nn.decoder import DecoderConfig


def read_config(raw: Mapping[str, object]) -> DecoderConfig:
    """Everything the decoder needs from a Qwen3 config; raises ConfigError for what it cannot honour."""
    r = ConfigReader(raw)
    hidden, n_q = r.positive("hidden_size"), r.positive("num_attention_heads")
    head_dim = r.positive("head_dim", 128)
    max_positions = r.positive("max_position_embeddings", 32_768)
    n_layers = r.positive("num_hidden_layers", limit=4096)
    eps = r.get(float, "rms_norm_eps", 1e-6)
    bias = r.get(bool, "attention_bias", False)
    r.must_be("hidden_act", "silu")
    n_kv = r.positive("num_key_value_heads", n_q)
    config = DecoderConfig(
        vocab_size=r.positive("vocab_size"),
        hidden=hidden,
        inner=r.positive("intermediate_size"),
        norm_eps=eps,
        rope=r.rope(head_dim, 10_000.0, max_positions),
        attention=[
            AttentionConfig(
                hidden, n_q, n_kv, head_dim, qkv_bias=bias, out_bias=bias, window=w, qk_norm_eps=eps
            )
            for w in r.layer_windows(n_layers)
        ],
        mlp_bias=False,
        tied=r.get(bool, "tie_word_embeddings", False),
        max_positions=max_positions,
    )
    r.finish()
    return config
