"""Kernels: the set of ops that a process uses, chosen once at start and passed as an argument."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kilat.ops import attention, fp8_linear, linear, rms_norm, rope_write, sample, silu_mul
from kilat.ops.batch import StepBatch
from kilat.ops.fp8_linear import Fp8Weight
from kilat.ops.layers import Layers, LayerWeights
from kilat.ops.linear import BlockWeight, LinearWeight
from kilat.ops.rope_write import Heads, KvScale, QkNorm
from kilat.ops.sample import Draws, Filter


class RopeWrite(Protocol):
    def __call__(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        kv: Tensor,
        batch: StepBatch,
        heads: Heads,
        norm: QkNorm | None = None,
        kv_scale: KvScale | None = None,
    ) -> Tensor: ...


class Attention(Protocol):
    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        batch: StepBatch,
        *,
        scale: float,
        window: int = 0,
        kv_scale: KvScale | None = None,
    ) -> Tensor: ...


class Draw(Protocol):
    def __call__(self, logits: Tensor, draws: Draws | None, *, filtered: bool) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class BlockOps:
    """Products with weights that stay quantized; activations and results are bf16.

    ``types``   ggml types -> values of a block
    ``pack``    the rows of several weights one after the other, and bias [N] bf16 or None, as one weight for ``linear`` and
                ``gated_linear``; K must be a multiple of every block. How close its products come to those of the dequantized
                weight is in the set's own documentation.
    ``gather``  ids [T] int32 -> those rows [T, K] of a packed weight, each value the format's, rounded once to bf16
    """

    types: Mapping[int, int]
    pack: Callable[[Sequence[BlockWeight], Tensor | None], LinearWeight]
    gather: Callable[[Tensor, LinearWeight], Tensor]


@dataclass(frozen=True, slots=True)
class Kernels:
    """One implementation of every op; each field's contract is the docstring of the function of the same name in ``ops/``.

    ``name`` is what ``kilat doctor`` prints, ``why`` the reason this set was taken. ``batch_invariant`` is a promise of all of them.
    ``linear`` and ``gated_linear`` take what ``pack_linear`` and ``pack_fp8`` made. ``pack_fp8`` None: the set has no FP8 product.
    ``bind_layers``: layers of one shape, and the epsilon of their norms, as one call; None where the ops are called one by one.
    ``cut_linear`` None: a packed weight has no parts, and ``rope_write`` takes whole rows only. ``fp8_kv``: ``rope_write`` and
    ``attention`` take a ``kv_scale``. ``quantized``: the same set, but ``rms_norm``, ``add_rms_norm``, ``attention`` and ``gated_linear`` give rows that are quantized already, which only its products with FP8 weights take.
    ``measure_next``: measure how one more product with packed weights is best computed in steps of up to so many rows, while nothing runs;
    False when nothing is left.
    """

    name: str
    why: str
    batch_invariant: bool
    pack_linear: Callable[[Tensor, Tensor | None], LinearWeight]
    linear: Callable[[Tensor, LinearWeight], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rope_write: RopeWrite
    attention: Attention
    silu_mul: Callable[[Tensor], Tensor]
    greedy: Callable[[Tensor], tuple[Tensor, Tensor]] = sample.greedy
    sample_rows: Callable[[Tensor, Sequence[Filter]], list[int]] = sample.sample_rows
    draw: Draw = sample.draw
    fused_gate: Callable[[Tensor, LinearWeight], Tensor] | None = None
    fused_norm: Callable[[Tensor, LinearWeight, Tensor, Tensor, float], tuple[Any, Tensor]] | None = None
    bind_layers: Callable[[Sequence[LayerWeights], float], Layers] | None = None
    blocks: BlockOps | None = None
    pack_fp8: Callable[[Fp8Weight, Tensor | None], LinearWeight] | None = None
    fp8_kv: bool = False
    cut_linear: Callable[[LinearWeight, slice], LinearWeight | None] | None = None
    quantized: "Kernels | None" = None
    measure_next: Callable[[int], bool] | None = None

    def feeding(self, w: LinearWeight) -> "Kernels":
        """The set whose results are what this set's product with ``w`` takes with the least work."""
        return self.quantized if self.quantized is not None and w.dtype == fp8_linear.FP8 else self

    def gated_linear(self, x: Tensor, w: LinearWeight) -> Tensor:
        """x [T, K], w [2 I, K] (gate first, then up) -> silu_mul(linear(x, w)) [T, I]; in one kernel where the set has it."""
        return self.fused_gate(x, w) if self.fused_gate else self.silu_mul(self.linear(x, w))

    def linear_add_rms_norm(
        self, x: Tensor, w: LinearWeight, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """add_rms_norm(linear(x, w), residual, weight, eps); in one kernel where the set has it. What comes first is for ``linear`` and
        ``gated_linear`` of this set only."""
        if self.fused_norm:
            return self.fused_norm(x, w, residual, weight, eps)
        return self.add_rms_norm(self.linear(x, w), residual, weight, eps)


def reference(why: str = "asked for") -> Kernels:
    """The torch reference set: runs on any device, batch-invariant, slow."""
    return Kernels(
        name="torch-reference",
        why=why,
        batch_invariant=True,
        pack_linear=linear.pack_linear,
        linear=fp8_linear.linear,
        rms_norm=rms_norm.rms_norm,
        add_rms_norm=rms_norm.add_rms_norm,
        rope_write=rope_write.rope_write,
        attention=attention.attention,
        silu_mul=silu_mul.silu_mul,
        pack_fp8=fp8_linear.pack_fp8,
        fp8_kv=True,
        cut_linear=fp8_linear.cut_linear,
    )


def triton_set(why: str, *, exact: bool) -> Kernels:
    """The set for CUDA devices; ``exact`` takes batch-invariant kernels throughout. Imported here, because Triton is only there where
    a device is."""
    from kilat.ops.triton.kernels import triton_kernels

    return triton_kernels(why, exact=exact)


def compiling_triton_set(*, exact: bool) -> Kernels:
    """:func:`triton_set` for tensors on the meta device: from now on a launch in this process compiles its kernel into the machine's cache
    and does nothing else."""
    from kilat.ops.triton.kernels import triton_kernels
    from kilat.ops.triton.launch import compile_only

    compile_only()
    return triton_kernels("compiling", exact=exact, device=torch.device("meta"))
