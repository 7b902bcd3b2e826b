"""Typed, loud reading of a model's config. What is neither read nor known to be harmless is refused: it may change the math."""

from collections.abc import Mapping
from typing import TypeVar

from kilat.base.errors import ConfigError
from kilat.nn.rotary import Rope

T = TypeVar("T", int, float, bool, str)

# Fields that say how a model was trained, stored or prompted; none of them changes a forward pass.
HARMLESS = frozenset(
    "architectures model_type torch_dtype dtype transformers_version use_cache bos_token_id eos_token_id pad_token_id unk_token_id "
    "initializer_range attention_dropout hidden_dropout is_llama_config transformers.js_config "
    "name_or_path id2label label2id problem_type output_attentions output_hidden_states return_dict torchscript keys_to_ignore_at_inference "
    "tokenizer_class task_specific_params max_window_layers chunk_size_feed_forward is_encoder_decoder license".split()
)


class ConfigReader:
    """Reads each field once, checks its type, and refuses at :meth:`finish` what nobody asked for."""

    def __init__(self, raw: Mapping[str, object]) -> None:
        self.raw = raw
        self.seen: set[str] = set()
        self.name = str(raw.get("model_type", "model"))

    def get(self, kind: type[T], key: str, default: T | None = None) -> T:
        """Field ``key`` as ``kind``; absent or null gives ``default``, and without one raises ConfigError."""
        self.seen.add(key)
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.name} config has no {key!r}, which has no default")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{self.name} config: {key!r} is {value!r}, expected {kind.__name__}")
        return value

    def positive(self, key: str, default: int | None = None, limit: int = 1 << 24) -> int:
        """An integer of 1 to ``limit``."""
        value = self.get(int, key, default)
        if not 1 <= value <= limit:
            raise ConfigError(f"{self.name} config: {key!r} is {value}, allowed 1 to {limit}")
        return value

    def must_be(self, key: str, *allowed: object) -> None:
        """Refuse any value but these (an absent field is fine): the code below computes only that."""
        self.seen.add(key)
        value = self.raw.get(key, allowed[0])
        if value is not None and value not in allowed:
            raise ConfigError(
                f"{self.name} config: {key!r} is {value!r}; supported: {', '.join(map(repr, allowed))}"
            )

    def rope(self, head_dim: int, default_theta: float, max_positions: int) -> Rope:
        """Rotary parameters, in the old form (``rope_theta`` + ``rope_scaling``) or the new one (``rope_parameters``)."""
        parameters = self._mapping("rope_parameters")
        scaling = dict(self._mapping("rope_scaling") or parameters)
        theta = parameters.get("rope_theta") or self.get(float, "rope_theta", default_theta)
        partial = parameters.get("partial_rotary_factor") or self.get(float, "partial_rotary_factor", 1.0)
        if (
            not isinstance(theta, int | float)
            or theta <= 1
            or not isinstance(partial, int | float)
            or not 0 < partial <= 1
        ):
            raise ConfigError(
                f"{self.name} config: rope_theta {theta!r} or partial_rotary_factor {partial!r} is out of range"
            )
        kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
        scaling.pop("type", None)
        for handled in ("rope_theta", "partial_rotary_factor"):
            scaling.pop(handled, None)
        if kind == "default" and scaling:
            raise ConfigError(f"{self.name} config: rope parameters {sorted(scaling)} without a scaling type")
        dim = int(head_dim * partial)
        if dim % 2 or dim < 2:
            raise ConfigError(f"{self.name} config: rotary dimension {dim} is not an even number above 0")
        return Rope(dim, float(theta), max_positions, {"type": kind, **scaling})

    def layer_windows(self, n_layers: int) -> list[int]:
        """Sliding window of each layer (0: none), from ``use_sliding_window``, ``sliding_window``, ``max_window_layers`` and ``layer_types``."""
        types = self.raw.get("layer_types")
        self.seen |= {"layer_types", "sliding_window", "use_sliding_window"}
        if not self.get(bool, "use_sliding_window", False):
            if types is not None and set(self._list("layer_types")) != {"full_attention"}:
                raise ConfigError(f"{self.name} config: layer_types {types!r} without use_sliding_window")
            return [0] * n_layers
        window = self.positive("sliding_window")
        if types is None:
            first = self.get(int, "max_window_layers", n_layers)
            return [window if i >= first else 0 for i in range(n_layers)]
        kinds = {"full_attention": 0, "sliding_attention": window}
        listed = self._list("layer_types")
        if len(listed) != n_layers or any(t not in kinds for t in listed):
            raise ConfigError(
                f"{self.name} config: layer_types {types!r} does not fit {n_layers} layers of {sorted(kinds)}"
            )
        return [kinds[str(t)] for t in listed]

    def _list(self, key: str) -> list[object]:
        self.seen.add(key)
        value = self.raw.get(key)
        if not isinstance(value, list):
            raise ConfigError(f"{self.name} config: {key!r} is {value!r}, expected a list")
        return value

    def _mapping(self, key: str) -> Mapping[str, object]:
        self.seen.add(key)
        value = self.raw.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.name} config: {key!r} is {value!r}, expected an object")
        return value

    def finish(self) -> None:
        """Refuse fields that were not read and are not known to be harmless, unless they are null, false or empty."""
        unknown = [
            k
            for k, v in self.raw.items()
            if k not in self.seen
            and k not in HARMLESS
            and not k.startswith("_")
            and v not in (None, False, 0, "", [], {})
        ]
        if unknown:
            raise ConfigError(
                f"{self.name} config has {', '.join(sorted(unknown))}, which this version does not know and which may change the "
                "model's math; remove what is not needed from config.json or use a newer kilat"
            )
