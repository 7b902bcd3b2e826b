"""layers: what all layers of a decoder need to run in one call, for sets on which the time between two ops counts."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kilat.ops.batch import StepBatch
from kilat.ops.linear import LinearWeight
from kilat.ops.rope_write import Heads, QkNorm


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A pre-norm layer of attention and gated MLP: packed weights, norms [hidden], ``window`` as in ``attention``."""

    norm_in: Tensor
    qkv: LinearWeight
    heads: Heads
    norm: QkNorm | None
    window: int
    out: LinearWeight
    norm_mid: Tensor
    gate_up: LinearWeight
    down: LinearWeight


class Layers(Protocol):
    """x [T, hidden] -> (x, residual) of the tokens at ``batch.logits_at`` [S, hidden], all if that is None; their sum leaves the last
    layer. x is overwritten. ``kv``: the whole pool [pages, layers, 2, page_tokens, Hkv, D]. To the bit what the set's ops give one
    after the other."""

    def __call__(self, x: Tensor, cos_sin: Tensor, kv: Tensor, batch: StepBatch) -> tuple[Tensor, Tensor]: ...
