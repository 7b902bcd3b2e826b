"""All layers of a decoder in one call of the native library."""

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_double, c_int, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from kilat.base.errors import EngineError
from kilat.ops.batch import StepBatch
from kilat.ops.cpu.library import HeadShape, KvView, Rows
from kilat.ops.layers import LayerWeights

_EVERY_TOKEN, _LAST_OF_ROWS, _NO_TOKEN = range(3)


class _Layer(ctypes.Structure):
    """``kilat_layer``."""

    _fields_ = [
        *((name, c_void_p) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("norm_in", "norm_mid", "q_norm", "k_norm")),
        ("window", c_int64),
    ]


class _Decoder(ctypes.Structure):
    """``kilat_decoder``."""

    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        ("n", c_int64),
        ("hidden", c_int64),
        ("inner", c_int64),
        ("heads", HeadShape),
        ("eps", c_double),
        ("qk_eps", c_double),
        ("dtype", c_int),
    ]


class _Pass(ctypes.Structure):
    """``kilat_pass``."""

    _fields_ = [
        ("cos_sin", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("rows", Rows),
        ("kv", KvView),
        ("layer_stride", c_int64),
        ("tokens", c_int64),
        ("wanted", c_int),
        ("seen", c_void_p),
        ("user", c_void_p),
    ]


class BoundLayers:
    """The layers of one model on one native context; ``owner`` keeps that context alive. See ``ops.layers.Layers``.

    ``codes`` are the library's numbers of dtypes. Shapes and dtypes that would make native code read past a tensor raise EngineError;
    page ids and positions are trusted.
    """

    def __init__(
        self,
        owner: object,
        library: ctypes.CDLL,
        context: int,
        codes: dict[torch.dtype, int],
        weights: Sequence[LayerWeights],
        eps: float,
    ) -> None:
        first = weights[0]
        self._kept = (owner, tuple(weights))
        self._context = context
        self._room, self._run = library.kilat_layers_room, library.kilat_layers_run
        self._dtype, self._heads = first.norm_in.dtype, first.heads
        self._hidden = first.norm_in.shape[0]
        inner = first.down.shape[1]
        for w in weights:
            self._check(w, inner)
        layers = (_Layer * len(weights))(*map(_layer, weights))
        qk_eps = 0.0 if first.norm is None else first.norm.eps
        shape = HeadShape(first.heads.n_q, first.heads.n_kv, first.heads.dim, 0)
        self._decoder = _Decoder(
            layers, len(weights), self._hidden, inner, shape, eps, qk_eps, codes[self._dtype]
        )

    def _check(self, w: LayerWeights, inner: int) -> None:
        h, hidden = self._heads, self._hidden
        q = h.n_q * h.dim
        shapes = {
            "qkv": (w.qkv.shape, (q + 2 * h.n_kv * h.dim, hidden)),
            "out": (w.out.shape, (hidden, q)),
            "gate_up": (w.gate_up.shape, (2 * inner, hidden)),
            "down": (w.down.shape, (hidden, inner)),
        }
        norms = [w.norm_in, w.norm_mid, *((w.norm.q, w.norm.k) if w.norm else ())]
        lengths = [hidden, hidden, h.dim, h.dim]
        if (
            w.heads != h
            or any(got != wanted for got, wanted in shapes.values())
            or any(p.dtype != self._dtype for p in (w.qkv, w.out, w.gate_up, w.down, *norms))
            or any(n.shape != (size,) or not n.is_contiguous() for n, size in zip(norms, lengths))
        ):
            raise EngineError(f"layers of different shapes or dtypes: {shapes}, {w.heads} beside {h}")

    def __call__(self, x: Tensor, cos_sin: Tensor, kv: Tensor, batch: StepBatch) -> tuple[Tensor, Tensor]:
        h, (n, hidden) = self._heads, x.shape
        pages = (kv.shape[1], kv.shape[4], kv.shape[5])
        if hidden != self._hidden or x.dtype != self._dtype or not x.is_contiguous():
            raise EngineError(f"layers of {self._hidden} {self._dtype} with {tuple(x.shape)} {x.dtype}")
        if pages != (self._decoder.n, h.n_kv, h.dim) or kv.dtype != self._dtype or kv.stride(5) != 1:
            raise EngineError(f"page pool {kv.dtype} {tuple(kv.shape)} for {self._decoder.n} layers of {h}")
        if cos_sin.shape[1] > h.dim or not cos_sin.is_contiguous():
            raise EngineError(f"{cos_sin.shape[1]} rotated elements of heads of {h.dim}")
        self._decoder.heads.rotary = cos_sin.shape[1]
        page, layer, side, token, head, _ = kv.stride()
        table, lengths = batch.page_table, batch.kv_len
        rows = lengths.shape[0]
        wanted, places = _wanted(batch, n)
        step = _Pass(
            cos_sin.data_ptr(),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            Rows(batch.row_start.data_ptr(), lengths.data_ptr(), table.data_ptr(), rows, table.stride(0)),
            KvView(kv.data_ptr(), page, side, token, head, kv.shape[3]),
            layer,
            n,
            wanted,
            None,
            None,
        )
        residual = torch.empty_like(x)
        room = torch.empty(self._room(byref(self._decoder), n, rows), dtype=torch.uint8)
        at = (x.data_ptr(), residual.data_ptr(), room.data_ptr())
        if self._run(self._context, byref(self._decoder), byref(step), *at):
            raise EngineError("no memory for a forward pass")
        return (x, residual) if places is None else (x[places], residual[places])


def _wanted(batch: StepBatch, n_tokens: int) -> tuple[int, slice | Tensor | None]:
    """What a pass goes on with past the keys and values of the last layer, and where in its result the tokens at ``logits_at`` are; None:
    they are all of it."""
    if batch.logits_at is None:
        return _EVERY_TOKEN, None
    at, n_rows = batch.logits_at.numpy(), batch.kv_len.shape[0]
    if len(at) == 0:
        return _NO_TOKEN, slice(0, 0)
    if n_tokens == n_rows:
        whole = np.array_equal(at, np.arange(n_tokens))  # rows may be empty, and others long
        return _EVERY_TOKEN, None if whole else batch.logits_at
    last = batch.row_start.numpy()[1:] - 1
    rows = np.searchsorted(last, at)
    # an empty row in front has no last token; the log-probabilities of a prompt want others too
    if last[0] < 0 or not np.array_equal(last[rows], at):
        return _EVERY_TOKEN, batch.logits_at
    whole = np.array_equal(rows, np.arange(n_rows))
    return _LAST_OF_ROWS, slice(0, n_rows) if whole else torch.from_numpy(rows)


def _layer(w: LayerWeights) -> _Layer:
    norms = (None, None) if w.norm is None else (w.norm.q.data_ptr(), w.norm.k.data_ptr())
    weights = (w.qkv.data.handle, w.out.data.handle, w.gate_up.data.handle, w.down.data.handle)
    return _Layer(*weights, w.norm_in.data_ptr(), w.norm_mid.data_ptr(), *norms, w.window)
