"""Llama 2/3.x and its relatives with the same math (SmolLM2, TinyLlama, Yi ...); ``model_type`` llama. Source: arXiv:2407.21783."""

from collections.abc import Mapping

from kilat.models.config_read import ConfigReader
from kilat.nn.attention import AttentionConfig
from kilat.nn.decoder import DecoderConfig


def read_config(raw: Mapping[str, object]) -> DecoderConfig:
    """Everything the decoder needs from a Llama config; raises ConfigError for what it cannot honour."""
    r = ConfigReader(raw)
    hidden, n_q = r.positive("hidden_size"), r.positive("num_attention_heads")
    head_dim = r.positive("head_dim", hidden // n_q)
    max_positions = r.positive("max_position_embeddings", 2048)
    bias = r.get(bool, "attention_bias", False)
    r.must_be("hidden_act", "silu")
    r.must_be("rope_interleaved", False)
    r.must_be("pretraining_tp", 1)
    attention = AttentionConfig(
        hidden, n_q, r.positive("num_key_value_heads", n_q), head_dim, qkv_bias=bias, out_bias=bias
    )
    config = DecoderConfig(
        vocab_size=r.positive("vocab_size"),
        hidden=hidden,
        inner=r.positive("intermediate_size"),
        norm_eps=r.get(float, "rms_norm_eps", 1e-6),
        rope=r.rope(head_dim, 10_000.0, max_positions),
        attention=[attention] * r.positive("num_hidden_layers", limit=4096),
        mlp_bias=r.get(bool, "mlp_bias", False),
        tied=r.get(bool, "tie_word_embeddings", False),
        max_positions=max_positions,
    )
    r.finish()
    return config
