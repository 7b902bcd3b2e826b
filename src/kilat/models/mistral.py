"""Mistral dense models; ``model_type`` mistral. Llama's math with an optional sliding window. Source: arXiv:2310.06825."""

from collections.abc import Mapping

from kilat.models.config_read import ConfigReader
from kilat.nn.attention import AttentionConfig
from kilat.nn.decoder import DecoderConfig


def read_config(raw: Mapping[str, object]) -> DecoderConfig:
    """Everything the decoder needs from a Mistral config; raises ConfigError for what it cannot honour."""
    r = ConfigReader(raw)
    hidden, n_q = r.positive("hidden_size"), r.positive("num_attention_heads")
    head_dim = r.positive("head_dim", hidden // n_q)
    max_positions = r.positive("max_position_embeddings", 131_072)
    r.must_be("hidden_act", "silu")
    r.must_be("attention_bias", False)
    window = r.get(int, "sliding_window", 0)
    attention = AttentionConfig(hidden, n_q, r.positive("num_key_value_heads", 8), head_dim, window=window)
    config = DecoderConfig(
        vocab_size=r.positive("vocab_size"),
        hidden=hidden,
        inner=r.positive("intermediate_size"),
        norm_eps=r.get(float, "rms_norm_eps", 1e-6),
        rope=r.rope(head_dim, 10_000.0, max_positions),
        attention=[attention] * r.positive("num_hidden_layers", limit=4096),
        mlp_bias=False,
        tied=r.get(bool, "tie_word_embeddings", False),
        max_positions=max_positions,
    )
    r.finish()
    return config
