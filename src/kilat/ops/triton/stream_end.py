"""What both streaming products do after their sums: add the cuts of K, the norm's factor, the bias and the gate, or the residual."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def add_cuts(
    y, up, part_ptr, mine, cut, at, inside, size,
    CUTS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """(y, up, whether this program has them all): the cut that finishes last adds all of them in their order.

    ``part_ptr`` holds [CUTS, 1 or 2, size] fp32, ``mine`` counts the finished cuts of this tile; zero before and after.
    """
    stride = size * (2 if GATED else 1)
    gl.store(part_ptr + cut * stride + at, y, mask=inside)
    if GATED:
        gl.store(part_ptr + cut * stride + size + at, up, mask=inside)
    gl.thread_barrier()
    last_cut = gl.atomic_add(mine, 1, sem="acq_rel", scope="gpu") == CUTS - 1
    if last_cut:
        gl.store(mine, 0)
        y = gl.load(part_ptr + at, mask=inside, other=0.0, cache_modifier=".cg")
        for c in gl.static_range(1, CUTS):
            y += gl.load(part_ptr + c * stride + at, mask=inside, other=0.0, cache_modifier=".cg")
        if GATED:
            up = gl.load(part_ptr + size + at, mask=inside, other=0.0, cache_modifier=".cg")
            for c in gl.static_range(1, CUTS):
                up += gl.load(part_ptr + c * stride + size + at, mask=inside, other=0.0, cache_modifier=".cg")
    return y, up, last_cut


@gluon.jit
def bias_and_gate(y, up, bias_ptr, n, n_out, KIND: gl.constexpr, GATED: gl.constexpr):
    """y [outputs, rows] fp32 with the bias of outputs ``n``; with GATED silu(y) * up, rounded to KIND where the separate ops round."""
    if bias_ptr is not None:
        y += gl.load(bias_ptr + n, mask=n < n_out, other=0.0).to(gl.float32)[:, None]
        if GATED:
            up += gl.load(bias_ptr + n_out + n, mask=n < n_out, other=0.0).to(gl.float32)[:, None]
    if GATED:
        y = y.to(KIND).to(gl.float32)
        y = (y / (1.0 + gl.exp(-y))).to(KIND).to(gl.float32) * up.to(KIND).to(gl.float32)
    return y


@gluon.jit
def square_parts(square_ptr, r, n_rows, n_squares, SQUARES: gl.constexpr, flat: gl.constexpr):
    """[SQUARES, rows] fp32: parts of the sums of squares of rows ``r``, which ``into_residual`` left; asked for early, needed late."""
    t = gl.arange(0, SQUARES, gl.SliceLayout(1, flat))
    there = (t[:, None] < n_squares) & (r[None, :] < n_rows)
    return gl.load(square_ptr + t[:, None] * n_rows + r[None, :], mask=there, other=0.0)


@gluon.jit
def into_residual(
    y, residual_ptr, norm_ptr, square_ptr, tile, at, n, r, inside, n_rows, n_out, KIND: gl.constexpr
):
    """y [outputs, rows] fp32 becomes (y + residual) * norm, fp32, without the factor of the whole row; the sum is the new residual, and the
    sum of its squares in this tile is left for those who know the factor."""
    old = gl.load(residual_ptr + at, mask=inside, other=0.0).to(gl.float32)
    weight = gl.load(norm_ptr + n, mask=n < n_out, other=0.0).to(gl.float32)
    y = (y.to(KIND).to(gl.float32) + old).to(KIND)
    gl.store(residual_ptr + at, y, mask=inside)
    y = gl.where(inside, y.to(gl.float32), 0.0)
    gl.store(square_ptr + tile * n_rows + r, gl.sum(y * y, 0), mask=r < n_rows)
    return y * weight[:, None]
