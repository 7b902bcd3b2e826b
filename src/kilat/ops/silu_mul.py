"""silu_mul: the gate of a gated MLP."""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I] (gate first, then up) -> silu(gate) * up, [T, I], same dtype; silu is rounded to the dtype before the product."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
