"""Tiny random transformers models of each architecture, and their state dict as a WeightSource. Used by parity tests."""

import torch
import transformers as hf

from kilat.models.registry import read_config
from kilat.nn.build import Build
from kilat.nn.decoder import Decoder
from kilat.ops.kernels import Kernels
from kilat.parallel.mesh import Mesh

# tiny matrices: a second thread only waits for the first
torch.set_num_threads(1)
CPU = torch.device("cpu")

SHAPE = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def configs(**changes) -> dict:
    """Name -> transformers config; between them they use every branch of the model files. ``changes`` replaces fields of SHAPE."""
    shape = {**SHAPE, **changes}
    tied = {"tie_word_embeddings": True}
    window = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    return {
        "llama": hf.LlamaConfig(**shape),
        "llama-tied-bias": hf.LlamaConfig(
            **{**shape, **tied, "attention_bias": True, "mlp_bias": True, "head_dim": 16}
        ),
        "llama3-rope": hf.LlamaConfig(**shape, rope_parameters=LLAMA3),
        "llama-yarn": hf.LlamaConfig(**shape, rope_parameters=YARN),
        "llama-linear": hf.LlamaConfig(**shape, rope_parameters=LINEAR),
        "mistral": hf.MistralConfig(**shape, sliding_window=None),
        "mistral-window": hf.MistralConfig(**shape, sliding_window=20),
        "qwen2": hf.Qwen2Config(**shape),
        "qwen2-window": hf.Qwen2Config(**shape, **window),
        "qwen3": hf.Qwen3Config(**{"head_dim": 24, **shape}),
        "qwen3-bias": hf.Qwen3Config(**{"head_dim": 16, **shape, **tied, "attention_bias": True}),
    }


def transformers_model(name: str, **changes):
    """A transformers model with random weights, including biases and norms, which transformers starts at 0 and 1."""
    torch.manual_seed(0)
    config = configs(**changes)[name]
    config._attn_implementation = "eager"
    model = hf.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (1.0 if parameter.dim() == 1 else 0.0))
    return model


class StateDict:
    """A state dict as a WeightSource."""

    def __init__(self, model) -> None:
        self.tensors = dict(model.state_dict())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {k: tuple(v.shape) for k, v in self.tensors.items()}

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.tensors[name].to(dtype).clone()


def build_of(source: StateDict, kernels: Kernels, dtype=torch.float32, device=torch.device("cpu")) -> Build:
    return Build(source, Mesh(), kernels, dtype, device, lambda name, n_bytes: None)


def kilat_model(model, kernels: Kernels, dtype=torch.float32, device=torch.device("cpu")) -> Decoder:
    """The same model, built by kilat from the transformers config and weights."""
    build = build_of(StateDict(model), kernels, dtype, device)
    return Decoder(build, read_config(model.config.to_dict()), model.config.max_position_embeddings)


def pool(model: Decoder, n_pages: int, page_tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A KV pool filled with NaN, so that reading a slot nobody wrote shows."""
    a = model.config.attention[0]
    shape = (n_pages, len(model.layers), 2, page_tokens, a.n_kv, a.head_dim)
    return torch.full(shape, float("nan"), dtype=dtype)
