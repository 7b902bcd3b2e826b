"""What a step costs at least: the bytes that it has to read and the floating-point operations that it has to do."""

from collections.abc import Iterable
from dataclasses import dataclass

from kilat.nn.decoder import Decoder
from kilat.ops.linear import LinearWeight
from kilat.policy.sched.plan import Row
from kilat.wire.kv import KvLayout


@dataclass(frozen=True, slots=True)
class Work:
    """Of one step or of several together."""

    read_bytes: float
    flops: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.read_bytes + other.read_bytes, self.flops + other.flops)


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Layers that are alike, ``n`` of them: values of their queries for one token, and the attention window (0: none)."""

    n: int
    query_values: int
    window: int


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Sizes of a model: ``body`` are the matrices of its layers, which every token goes through, ``head`` makes the logits. Bytes are those
    of the weights as the kernel set keeps them; what is only looked up (the embedding) and small (norms) is left out. ``kv_bytes``: keys and
    values of one token in one layer.
    """

    body_bytes: int
    body_values: int
    head_bytes: int
    head_values: int
    kv_bytes: float
    layers: tuple[LayerWork, ...]

    def step(self, rows: Iterable[Row]) -> Work:
        """Of one step over ``rows``: weights once, and each row's keys and values once, as far as it sees them."""
        n_tokens, n_logits, kv_tokens, attended = 0, 0, 0, 0
        for row in rows:
            n = row.n_tokens
            n_tokens += n
            n_logits += n if row.prompt_logprobs else int(row.sample)
            for layer in self.layers:
                seen = row.start + n
                kv_tokens += layer.n * (min(seen, layer.window + n - 1) if layer.window else seen)
                attended += layer.n * layer.query_values * _keys(row.start, n, layer.window)
        read = self.body_bytes + kv_tokens * self.kv_bytes + (self.head_bytes if n_logits else 0)
        return Work(read, 2 * (n_tokens * self.body_values + n_logits * self.head_values) + 4 * attended)


def _keys(start: int, n: int, window: int) -> int:
    """Keys that ``n`` tokens from position ``start`` on look at, each those up to itself."""
    if window and start + n > window:
        short = max(0, window - start)  # tokens whose window still begins at 0
        return _keys(start, short, 0) + (n - short) * window
    return n * start + n * (n + 1) // 2


def model_work(model: Decoder, layout: KvLayout) -> ModelWork:
    """The sizes of ``model`` over pages of ``layout``."""
    matrices: list[LinearWeight] = []
    alike: dict[tuple[int, int], int] = {}
    for layer in model.layers:
        a = layer.attention
        matrices += [a.qkv, a.out.weight, layer.mlp.gate_up, layer.mlp.down.weight]
        kind = (a.heads.n_q * a.heads.dim, a.window)
        alike[kind] = alike.get(kind, 0) + 1
    return ModelWork(
        body_bytes=sum(w.n_bytes for w in matrices),
        body_values=sum(w.shape[0] * w.shape[1] for w in matrices),
        head_bytes=model.head.n_bytes,
        head_values=model.head.shape[0] * model.head.shape[1],
        kv_bytes=layout.page_bytes / layout.page_tokens / layout.layers,
        layers=tuple(LayerWork(n, values, window) for (values, window), n in alike.items()),
    )
