"""triton_kernels: the CUDA sets of ops, fast and exact."""

import torch

from kilat.ops.kernels import Kernels
from kilat.ops.triton import linear, rms_norm, rope_write, sample, silu_mul
from kilat.ops.triton.attention import Attention


def triton_kernels(why: str, *, exact: bool = False) -> Kernels:
    """The set for the current CUDA device, to be used by one thread and stream. ``exact`` takes batch-invariant kernels throughout."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Kernels(
        name="triton-exact" if exact else "triton",
        why=why,
        batch_invariant=exact,
        pack_linear=linear.pack_linear,
        linear=linear.linear_exact if exact else linear.linear,
        rms_norm=rms_norm.rms_norm,
        add_rms_norm=rms_norm.add_rms_norm,
        rope_write=rope_write.rope_write,
        attention=Attention(device, exact=exact),
        silu_mul=silu_mul.silu_mul,
        draw=sample.draw,
        fused_gate=linear.gated_linear_exact if exact else linear.gated_linear,
    )
