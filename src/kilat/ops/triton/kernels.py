"""triton_kernels: the CUDA sets of ops, fast and exact."""

from kilat.ops.kernels import Kernels
from kilat.ops.triton import attention, linear, rms_norm, rope_write, silu_mul


def triton_kernels(why: str, *, exact: bool = False) -> Kernels:
    """The set for one CUDA device. ``exact`` takes the batch-invariant versions of the ops that have two."""
    return Kernels(
        name="triton-exact" if exact else "triton",
        why=why,
        batch_invariant=exact,
        pack_linear=linear.pack_linear,
        linear=linear.linear,
        rms_norm=rms_norm.rms_norm,
        add_rms_norm=rms_norm.add_rms_norm,
        rope_write=rope_write.rope_write,
        attention=attention.attention_exact if exact else attention.attention,
        silu_mul=silu_mul.silu_mul,
    )
