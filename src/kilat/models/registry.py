"""From a config's ``model_type`` to a model. The only place that knows which architectures exist."""

from collections.abc import Callable, Mapping

from kilat.base.errors import ConfigError
from kilat.models import llama, mistral, qwen2, qwen3
from kilat.nn.decoder import DecoderConfig
from kilat.quant.fp8_blocks import checkpoint_quant

READERS: Mapping[str, Callable[[Mapping[str, object]], DecoderConfig]] = {
    "llama": llama.read_config,
    "mistral": mistral.read_config,
    "qwen2": qwen2.read_config,
    "qwen3": qwen3.read_config,
}


def read_config(raw: Mapping[str, object]) -> DecoderConfig:
    """The decoder's config from a Hugging Face style ``raw`` config. Raises ConfigError for an architecture or a
    way of storing weights that is not known."""
    kind = raw.get("model_type")
    if kind not in READERS:
        raise ConfigError(f"model_type {kind!r} is not supported; supported: {', '.join(sorted(READERS))}")
    checkpoint_quant(raw)
    return READERS[str(kind)]({key: value for key, value in raw.items() if key != "quantization_config"})
