"""Grouped-query attention over paged KV: fused QKV product, norm and rotation with the page write, attention; the output product is for the caller."""

from dataclasses import dataclass, replace

from torch import Tensor

from kilat.nn.build import Build
from kilat.nn.linear import RowParallel, column_parallel
from kilat.ops.batch import StepBatch
from kilat.ops.linear import LinearWeight
from kilat.ops.rope_write import Heads, KvScale, QkNorm


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Shape of the layer over the whole mesh. ``window`` 0 means full attention; ``qk_norm_eps`` None means no head norms."""

    hidden: int
    n_q: int
    n_kv: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    window: int = 0
    qk_norm_eps: float | None = None


class Attention:
    """x [T, hidden] -> what ``out`` takes [T, heads]; writes this layer's K and V of the step's tokens into ``kv`` [pages, 2, page_tokens, Hkv, D].

    ``kv_scale`` is set once, before the first step over e4m3 pages; None means pages of the model's dtype.
    """

    def __init__(self, build: Build, name: str, config: AttentionConfig) -> None:
        c = config
        q_out, kv_out = c.n_q * c.head_dim, c.n_kv * c.head_dim
        parts = [(f"{name}.q_proj", q_out), (f"{name}.k_proj", kv_out), (f"{name}.v_proj", kv_out)]
        self.qkv = column_parallel(build, parts, c.hidden, bias=c.qkv_bias)
        self.out = RowParallel(build, f"{name}.o_proj", c.hidden, q_out, bias=c.out_bias)
        self.heads = Heads(
            build.mesh.share(c.n_q, "query heads"), build.mesh.share(c.n_kv, "key/value heads"), c.head_dim
        )
        self.norm: QkNorm | None = None
        if c.qk_norm_eps is not None:
            q = build.take(f"{name}.q_norm.weight", (c.head_dim,))
            k = build.take(f"{name}.k_norm.weight", (c.head_dim,))
            self.norm = QkNorm(q, k, c.qk_norm_eps)
        self.kv_scale: KvScale | None = None
        self.window, self.scale, self.kernels = c.window, c.head_dim**-0.5, build.kernels
        self.feed_out = build.kernels.feeding(self.out.weight)
        self.parts = self._parts()

    def _parts(self) -> tuple[LinearWeight, LinearWeight] | None:
        """The fused weight as that of Q and that of K and V; None where it cannot be cut there."""
        cut, n_q, n_out = self.kernels.cut_linear, self.heads.n_q * self.heads.dim, self.qkv.shape[0]
        if cut is None:
            return None
        q, kv = cut(self.qkv, slice(0, n_q)), cut(self.qkv, slice(n_q, n_out))
        return None if q is None or kv is None else (q, kv)

    def __call__(self, x: Tensor, cos_sin: Tensor, kv: Tensor, batch: StepBatch) -> Tensor:
        qkv = self.kernels.linear(x, self.qkv)
        q = self.kernels.rope_write(qkv, cos_sin, kv, batch, self.heads, self.norm, self.kv_scale)
        return self._attend(q, kv, batch)

    def write(self, x: Tensor, cos_sin: Tensor, kv: Tensor, batch: StepBatch) -> None:
        """The write of K and V alone. Needs ``parts``, as :meth:`read` does."""
        assert self.parts is not None
        heads = replace(self.heads, n_q=0)
        y = self.kernels.linear(x, self.parts[1])
        self.kernels.rope_write(y, cos_sin, kv, batch, heads, self.norm, self.kv_scale)

    def read(self, x: Tensor, cos_sin: Tensor, kv: Tensor, batch: StepBatch) -> Tensor:
        """The rest, for tokens whose K and V are written."""
        assert self.parts is not None
        heads = replace(self.heads, n_kv=0)
        y = self.kernels.linear(x, self.parts[0])
        return self._attend(self.kernels.rope_write(y, cos_sin, kv, batch, heads, self.norm), kv, batch)

    def _attend(self, q: Tensor, kv: Tensor, batch: StepBatch) -> Tensor:
        return self.feed_out.attention(
            q, kv, batch, scale=self.scale, window=self.window, kv_scale=self.kv_scale
        )
