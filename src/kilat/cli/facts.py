"""What a model's files say about it: sizes, formats, memory per token. Reads headers only; no torch."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kilat.base import gguf_header
from kilat.base.errors import ConfigError, ModelFileError
from kilat.load.config import read_config, read_generation
from kilat.load.files import ModelFiles
from kilat.load.safetensors_header import read_header

# bytes per value of the types that the engine computes in
DTYPE_BYTES = (("bfloat16", 2), ("float32", 4))


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model. ``formats``: storage format -> (tensors, values, bytes), most bytes first. ``kv_values``:
    keys and values that one token leaves in the cache, over all layers. ``context``: tokens it was trained
    for.
    """

    name: str
    architecture: str
    config: Mapping[str, object]
    context: int
    parameters: int
    stored_bytes: int
    formats: Mapping[str, tuple[int, int, int]]
    kv_values: int


def read_facts(files: ModelFiles) -> ModelFacts:
    """Facts of a model on disk. Raises ModelFileError or ConfigError for files that cannot be read."""
    config = read_config(files)
    tensors: Counter[str] = Counter()
    values: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    for kind, shape, n_bytes in _tensors(files):
        tensors[kind] += 1
        values[kind] += math.prod(shape)
        stored[kind] += n_bytes
    return ModelFacts(
        name=files.name,
        architecture=str(config["model_type"]),
        config=config,
        context=read_generation(files).max_model_len,
        parameters=values.total(),
        stored_bytes=stored.total(),
        formats={k: (tensors[k], values[k], n) for k, n in stored.most_common()},
        kv_values=_kv_values(config),
    )


def _tensors(files: ModelFiles) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """(format, shape, bytes) of every tensor."""
    if files.kind == "gguf":
        for info in gguf_header.read(files.path).tensors.values():
            yield gguf_header.GGML_TYPES[info.ggml_type].name, info.shape, info.n_bytes
        return
    # "consolidated" files are a second copy of the same weights under other names
    shards = [p for p in sorted(files.path.glob("*.safetensors")) if not p.name.startswith("consolidated")]
    if not shards:
        raise ModelFileError(
            f"{files.path.name} has no safetensors files: the download is incomplete, or it is another format"
        )
    for shard in shards:
        for entry in read_header(shard).values():
            yield entry.dtype, entry.shape, entry.end - entry.begin


def _kv_values(config: Mapping[str, object]) -> int:
    layers, heads, hidden = (
        _number(config, k) for k in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    head_dim = _number(config, "head_dim", hidden // heads)
    return 2 * layers * _number(config, "num_key_value_heads", heads) * head_dim


def _number(config: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = config.get(name) or default  # transformers writes null for "as the other field says"
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r} in the model's config, want a whole number above 0")
    return value
