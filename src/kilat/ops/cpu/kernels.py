"""The kernel set of the CPU backend: every op of ``ops`` on the native library."""

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from ctypes import byref

import torch
from torch import Tensor

from kilat.base.errors import ConfigError, EngineError
from kilat.ops.batch import StepBatch
from kilat.ops.cpu.layers import BoundLayers
from kilat.ops.cpu.library import (
    BF16,
    F32,
    MAX_HEAD_DIM,
    MAX_PARTS,
    BlockRows,
    HeadShape,
    KvView,
    Rows,
    SampleFilter,
    load,
)
from kilat.ops.kernels import BlockOps, Kernels
from kilat.ops.layers import Layers, LayerWeights
from kilat.ops.linear import BlockWeight, LinearWeight
from kilat.ops.rope_write import Heads, KvScale, QkNorm
from kilat.ops.sample import Filter, uniform

_DTYPES = {torch.float32: F32, torch.bfloat16: BF16}
_GGML_TYPES = 64  # numbers of block formats are below this


def available() -> tuple[bool, str]:
    """Whether the native kernels can be used here, and why (not). Builds them at the first call: seconds, then cached."""
    try:
        library = load()
    except ConfigError as error:
        return False, error.message
    name, note = _isa_name(library, library.kilat_cpu_best_isa()), library.kilat_cpu_amx_note().decode()
    return True, f"native kernels, {name}" + (f"; {note}" if note else "")


def cpu_kernels(
    threads: int, why: str = "asked for", *, isa: int | None = None, library: ctypes.CDLL | None = None
) -> Kernels:
    """The native set on ``threads`` threads (the caller's is one of them), for tensors of one dtype, fp32 or bf16.

    The threads live as long as the returned set. ``isa``: an index of the header's list, at most the best one of this machine
    (the default). ``library``: one that was loaded before. Raises ConfigError when the library cannot be built or the set cannot be created.
    """
    library = library or load()
    level = library.kilat_cpu_best_isa() if isa is None else isa
    ops = CpuOps(library, threads, level)
    return Kernels(
        name=f"cpu-{_isa_name(library, level)}",
        why=why,
        batch_invariant=True,
        pack_linear=ops.pack_linear,
        linear=ops.linear,
        rms_norm=ops.rms_norm,
        add_rms_norm=ops.add_rms_norm,
        rope_write=ops.rope_write,
        attention=ops.attention,
        silu_mul=ops.silu_mul,
        greedy=ops.greedy,
        sample_rows=ops.sample_rows,
        fused_gate=ops.gated_linear,
        bind_layers=ops.bind_layers,
        blocks=BlockOps(ops.block_types(), ops.pack_blocks, ops.gather),
    )


def _isa_name(library: ctypes.CDLL, isa: int) -> str:
    name: bytes = library.kilat_cpu_isa_name(isa)
    return name.decode()


class PackedWeight:
    """Owner of one packed weight; freed with this object."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self, library: ctypes.CDLL, handle: int) -> None:
        self.handle = handle
        weakref.finalize(self, library.kilat_linear_free, handle).atexit = False


class CpuOps:
    """The ops as methods; owns the native context (threads and scratch memory). Contracts are those of ``ops``.

    Tensors must be on the CPU, fp32 or bf16; an input whose last dimension is not contiguous is copied. Shapes and dtypes that
    would make the native code read past a tensor raise EngineError; page ids and positions are trusted.
    """

    def __init__(self, library: ctypes.CDLL, threads: int, isa: int) -> None:
        context = library.kilat_cpu_create(threads, isa)
        if not context:
            name = _isa_name(library, isa)
            raise ConfigError(
                f"no CPU kernels with {threads} threads on {name}: this machine has fewer instructions or no memory"
            )
        self._library = library
        self._context = context
        # Not at interpreter exit: another thread may still be inside an op then, and the process takes everything with it.
        weakref.finalize(self, library.kilat_cpu_destroy, context).atexit = False
        self._linear = library.kilat_linear_run
        self._gated_linear = library.kilat_gated_linear_run
        self._gated_linear_can = library.kilat_gated_linear_can
        self._rms_norm = library.kilat_rms_norm
        self._add_rms_norm = library.kilat_add_rms_norm
        self._silu_mul = library.kilat_silu_mul
        self._greedy = library.kilat_greedy
        self._sample_rows = library.kilat_sample_rows
        self._rope_write = library.kilat_rope_write
        self._attention = library.kilat_attention

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> LinearWeight:
        """Pack into panels; afterwards ``weight`` is not needed and may be freed by the caller."""
        code = _code(weight)
        n, k = weight.shape
        weight = _rows_of(weight)
        if bias is not None and (bias.shape != (n,) or bias.dtype != weight.dtype):
            raise EngineError(
                f"bias {tuple(bias.shape)} {bias.dtype} does not fit weight {n} x {k} {weight.dtype}"
            )
        bias = None if bias is None else bias.contiguous()
        handle = self._library.kilat_linear_pack(
            self._context,
            code,
            weight.data_ptr(),
            weight.stride(0),
            n,
            k,
            None if bias is None else bias.data_ptr(),
        )
        if not handle:
            raise EngineError(f"no memory to pack a weight of {n} x {k}")
        n_bytes = self._library.kilat_linear_bytes(handle)
        return LinearWeight(PackedWeight(self._library, handle), (n, k), weight.dtype, bias, n_bytes)

    def block_types(self) -> Mapping[int, int]:
        """ggml type -> values of a block, of every format that stays quantized."""
        values = {t: int(self._library.kilat_block_values(t)) for t in range(_GGML_TYPES)}
        return {t: n for t, n in values.items() if n}

    def pack_blocks(self, parts: Sequence[BlockWeight], bias: Tensor | None = None) -> LinearWeight:
        """Pack into panels; the tensors are not needed afterwards. The header tells what a product rounds."""
        if not 1 <= len(parts) <= MAX_PARTS:
            raise EngineError(f"a weight of {len(parts)} parts, limit {MAX_PARTS}")
        k = parts[0].shape[1]
        n = sum(part.shape[0] for part in parts)
        rows = (BlockRows * len(parts))()
        for row, part in zip(rows, parts, strict=True):
            values = self._library.kilat_block_values(part.ggml_type)
            row_bytes = k // values * self._library.kilat_block_bytes(part.ggml_type) if values else 0
            if (
                part.shape[1] != k
                or part.data.dtype != torch.uint8
                or not values
                or part.data.shape != (part.shape[0], row_bytes)
                or k % values
                or part.data.stride(1) != 1
            ):
                raise EngineError(
                    f"blocks of type {part.ggml_type}, {tuple(part.data.shape)} bytes, do not hold {part.shape[0]} x {k} values"
                )
            row.type, row.data, row.row_bytes, row.n = (
                part.ggml_type,
                part.data.data_ptr(),
                part.data.stride(0),
                part.shape[0],
            )
        if bias is not None and (bias.shape != (n,) or bias.dtype != torch.bfloat16):
            raise EngineError(f"bias {tuple(bias.shape)} {bias.dtype} does not fit weight {n} x {k} bfloat16")
        bias = None if bias is None else bias.contiguous()
        handle = self._library.kilat_linear_pack_quant(
            self._context, rows, len(parts), k, None if bias is None else bias.data_ptr(), None
        )
        if not handle:
            raise EngineError(f"no memory to pack a weight of {n} x {k}")
        n_bytes = self._library.kilat_linear_bytes(handle)
        return LinearWeight(PackedWeight(self._library, handle), (n, k), torch.bfloat16, bias, n_bytes)

    def gather(self, ids: Tensor, w: LinearWeight) -> Tensor:
        if ids.dim() != 1 or ids.dtype != torch.int32:
            raise EngineError(f"row ids {tuple(ids.shape)} {ids.dtype}, wanted one dimension of int32")
        ids = ids.contiguous()
        out = torch.empty(ids.shape[0], w.shape[1], dtype=w.dtype)
        if self._library.kilat_linear_gather(
            self._context, w.data.handle, ids.data_ptr(), ids.shape[0], out.data_ptr()
        ):
            raise EngineError(f"a row id is outside the {w.shape[0]} rows of the weight")
        return out

    def linear(self, x: Tensor, w: LinearWeight) -> Tensor:
        n, k = w.shape
        if x.dim() != 2 or x.shape[1] != k or x.dtype != w.dtype:
            raise EngineError(f"linear of {tuple(x.shape)} {x.dtype} with a weight of {n} x {k} {w.dtype}")
        x = _rows_of(x)
        out = x.new_empty(x.shape[0], n)
        if self._linear(self._context, w.data.handle, x.data_ptr(), x.stride(0), x.shape[0], out.data_ptr()):
            raise EngineError("no memory for a matrix product")
        return out

    def gated_linear(self, x: Tensor, w: LinearWeight) -> Tensor:
        """``silu_mul(linear(x, w))`` to the bit, without the array between them where the shape of ``w`` allows."""
        n, k = w.shape
        if not self._gated_linear_can(w.data.handle):
            return self.silu_mul(self.linear(x, w))
        if x.dim() != 2 or x.shape[1] != k or x.dtype != w.dtype:
            raise EngineError(f"linear of {tuple(x.shape)} {x.dtype} with a weight of {n} x {k} {w.dtype}")
        x = _rows_of(x)
        out = x.new_empty(x.shape[0], n // 2)
        if self._gated_linear(
            self._context, w.data.handle, x.data_ptr(), x.stride(0), x.shape[0], out.data_ptr()
        ):
            raise EngineError("no memory for a matrix product")
        return out

    def bind_layers(self, weights: Sequence[LayerWeights], eps: float) -> Layers:
        return BoundLayers(self, self._library, self._context, _DTYPES, weights, eps)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        n, h = x.shape
        code = _check_norm(x, weight, h)
        x = _rows_of(x)
        out = x.new_empty(n, h)
        self._rms_norm(
            self._context, code, x.data_ptr(), x.stride(0), n, h, weight.data_ptr(), eps, out.data_ptr()
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """``residual`` is updated in place."""
        n, h = x.shape
        code = _check_norm(x, weight, h)
        if residual.shape != x.shape or residual.dtype != x.dtype:
            raise EngineError(
                f"residual {tuple(residual.shape)} {residual.dtype} beside {tuple(x.shape)} {x.dtype}"
            )
        x = _rows_of(x)
        residual = residual.contiguous()
        out = x.new_empty(n, h)
        at = (x.data_ptr(), x.stride(0), residual.data_ptr())
        self._add_rms_norm(self._context, code, *at, n, h, weight.data_ptr(), eps, out.data_ptr())
        return out, residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        code = _code(gate_up)
        x = _rows_of(gate_up)
        rows, n = x.shape[0], x.shape[1] // 2
        out = x.new_empty(rows, n)
        self._silu_mul(self._context, code, x.data_ptr(), x.stride(0), rows, n, out.data_ptr())
        return out

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The largest logits come back as fp32."""
        code = _code(logits)
        x = _rows_of(logits)
        rows, n = x.shape
        ids, top = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        self._greedy(self._context, code, x.data_ptr(), x.stride(0), rows, n, ids.data_ptr(), top.data_ptr())
        return ids, top

    def sample_rows(self, logits: Tensor, filters: Sequence[Filter]) -> list[int]:
        if logits.dim() != 2 or logits.dtype != torch.float32 or logits.shape[0] != len(filters):
            raise EngineError(
                f"sampling from {tuple(logits.shape)} {logits.dtype}, wanted {len(filters)} fp32 rows"
            )
        x = _rows_of(logits)
        rows, n = x.shape
        made = (SampleFilter * rows)(
            *(
                SampleFilter(f.temperature, f.top_p, f.min_p, uniform(f.seed, f.position), f.top_k)
                for f in filters
            )
        )
        ids = torch.empty(rows, dtype=torch.int64)
        if self._sample_rows(self._context, x.data_ptr(), x.stride(0), rows, n, made, ids.data_ptr()):
            raise EngineError("no memory to sample")
        out: list[int] = ids.tolist()
        return out

    def rope_write(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        kv: Tensor,
        batch: StepBatch,
        heads: Heads,
        norm: QkNorm | None = None,
        kv_scale: KvScale | None = None,
    ) -> Tensor:
        _no_fp8_pages(kv_scale)
        code = _code(qkv)
        rotary = cos_sin.shape[1]
        shape = HeadShape(heads.n_q, heads.n_kv, heads.dim, rotary)
        if (
            qkv.shape[1] != (heads.n_q + 2 * heads.n_kv) * heads.dim
            or rotary > heads.dim
            or heads.dim > MAX_HEAD_DIM
        ):
            raise EngineError(
                f"qkv of width {qkv.shape[1]} for {heads}, {rotary} rotated, limit {MAX_HEAD_DIM} a head"
            )
        view = _view(kv, qkv)
        qkv, cos_sin = _rows_of(qkv), cos_sin.contiguous()
        n_tokens = qkv.shape[0]
        q = qkv.new_empty(n_tokens, heads.n_q, heads.dim)
        norms = (None, None, 0.0) if norm is None else (norm.q.data_ptr(), norm.k.data_ptr(), norm.eps)
        at = (cos_sin.data_ptr(), batch.positions.data_ptr(), batch.slots.data_ptr(), byref(view))
        self._rope_write(
            self._context,
            code,
            qkv.data_ptr(),
            qkv.stride(0),
            n_tokens,
            byref(shape),
            *at,
            *norms,
            q.data_ptr(),
        )
        return q

    def attention(
        self,
        q: Tensor,
        kv: Tensor,
        batch: StepBatch,
        *,
        scale: float,
        window: int = 0,
        kv_scale: KvScale | None = None,
    ) -> Tensor:
        _no_fp8_pages(kv_scale)
        code = _code(q)
        q = q.contiguous()
        n_tokens, n_q, dim = q.shape
        n_kv = kv.shape[3]
        if kv.shape[4] != dim or n_q % n_kv != 0 or dim > MAX_HEAD_DIM:
            raise EngineError(
                f"attention of {n_q} heads of {dim} over {n_kv} heads of {kv.shape[4]}, limit {MAX_HEAD_DIM}"
            )
        view, shape = _view(kv, q), HeadShape(n_q, n_kv, dim, 0)
        table, lengths = batch.page_table, batch.kv_len
        rows = Rows(
            batch.row_start.data_ptr(),
            lengths.data_ptr(),
            table.data_ptr(),
            lengths.shape[0],
            table.stride(0),
        )
        out = q.new_empty(n_tokens, n_q * dim)
        args = (code, q.data_ptr(), byref(shape), byref(view), byref(rows), scale, window, out.data_ptr())
        if self._attention(self._context, *args):
            raise EngineError("no memory for attention over this many keys")
        return out


def _no_fp8_pages(scale: KvScale | None) -> None:
    if scale is not None:
        raise EngineError("the CPU kernels have no FP8 pages; use the reference set or a CUDA device")


def _code(x: Tensor) -> int:
    code = _DTYPES.get(x.dtype)
    if code is None:
        raise EngineError(f"the CPU kernels take float32 and bfloat16, got {x.dtype}")
    return code


def _rows_of(x: Tensor) -> Tensor:
    """x [rows, n] with unit stride in the last dimension; a copy only if it must be."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _check_norm(x: Tensor, weight: Tensor, h: int) -> int:
    if weight.shape != (h,) or weight.dtype != x.dtype or not weight.is_contiguous():
        raise EngineError(
            f"norm weight {tuple(weight.shape)} {weight.dtype} beside rows {tuple(x.shape)} {x.dtype}"
        )
    return _code(x)


def _view(kv: Tensor, like: Tensor) -> KvView:
    if kv.dtype != like.dtype or kv.stride(4) != 1:
        raise EngineError(f"page pool {kv.dtype} with strides {kv.stride()} for {like.dtype} activations")
    page, side, token, head, _ = kv.stride()
    return KvView(kv.data_ptr(), page, side, token, head, kv.shape[2])
