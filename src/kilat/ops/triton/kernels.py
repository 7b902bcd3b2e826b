"""triton_kernels: the CUDA sets of ops, fast and exact."""

from dataclasses import replace
from typing import Any

import torch

from kilat.ops.cuda.products import products
from kilat.ops.kernels import Kernels
from kilat.ops.triton import fp8_linear, linear, rms_norm, rope_write, sample, silu_mul
from kilat.ops.triton.attention import Attention


def triton_kernels(why: str, *, exact: bool = False, device: torch.device | None = None) -> Kernels:
    """The set for the current CUDA device or ``device``, to be used by one thread and stream. ``exact`` takes batch-invariant kernels
    throughout."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attention = Attention(device, exact=exact)
    plain = Kernels(
        name="triton-exact" if exact else "triton",
        why=why,
        batch_invariant=exact,
        pack_linear=linear.pack_linear,
        linear=linear.linear_exact if exact else linear.linear,
        rms_norm=rms_norm.rms_norm,
        add_rms_norm=rms_norm.add_rms_norm,
        rope_write=rope_write.rope_write,
        attention=attention,
        silu_mul=silu_mul.silu_mul,
        draw=sample.draw,
        fused_gate=linear.gated_linear_exact if exact else linear.gated_linear,
        fused_norm=None if exact else linear.linear_add_rms_norm,
        pack_fp8=fp8_linear.pack_fp8,
        fp8_kv=True,
        cut_linear=linear.cut_linear,
        measure_next=None if exact else products().measure_next,
    )
    # these return rows that only the FP8 products take: to the rest of the program a tensor like any other
    quantized: dict[str, Any] = {
        "rms_norm": rms_norm.rms_norm_fp8,
        "add_rms_norm": rms_norm.add_rms_norm_fp8,
        "attention": attention.quantized,
        "fused_norm": None if exact else fp8_linear.linear_add_rms_norm_fp8,
        "fused_gate": fp8_linear.gated_linear_exact_fp8 if exact else fp8_linear.gated_linear_fp8,
    }
    return replace(plain, quantized=replace(plain, **quantized))
