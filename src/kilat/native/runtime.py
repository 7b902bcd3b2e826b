"""Models and sessions of the native runtime. A step is one call into C; nothing of it is computed in Python.

What the calls mean is said in native/include/kilat.h. A session is used by one thread at a time; close sessions before their model.
Numbers come as memoryviews, which ``numpy.asarray`` takes as they are: a process that only wants tokens starts without numpy.
"""

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kilat.base.errors import ConfigError, EngineError, KilatError, LimitError, ModelFileError, RequestError
from kilat.native import library as lib

_ERRORS: dict[int, type[KilatError]] = {
    lib.BAD_ARGUMENT: RequestError,
    lib.BAD_FILE: ModelFileError,
    lib.UNSUPPORTED: ConfigError,
    lib.CONTEXT_FULL: LimitError,
}
_MOST_OWNERS = 64


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an id is drawn: ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch a filter off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def struct(self) -> lib.SamplingStruct:
        """The same for the library; ``seed`` modulo 2^64."""
        return lib.SamplingStruct(
            self.temperature, self.top_p, self.min_p, self.top_k, self.seed & (2**64 - 1)
        )


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of a loaded model; ``weights`` is ``stored`` or ``wide``, ``bos_id`` None when no id begins a text."""

    architecture: str
    kernels: str
    vocab: int
    hidden: int
    layers: int
    max_context: int
    parameters: int
    file_bytes: int
    dtype: str
    weights: str
    bos_id: int | None
    end_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MemoryOwner:
    """Memory of one owner, in bytes of this process and of the device."""

    owner: str
    host_bytes: int
    device_bytes: int


class NativeModel:
    """A model in the native runtime. ``weights``: ``stored`` keeps block formats as they are, ``wide`` widens them at load. ``library``: a
    build of the runtime other than the package's own, which has no CUDA.

    Raises ConfigError (no compiler, unknown options, an architecture that is not supported), ModelFileError, EngineError (memory).
    """

    def __init__(
        self,
        path: Path,
        *,
        device: str = "cpu",
        threads: int = 0,
        dtype: str = "auto",
        weights: str = "auto",
        library: Path | None = None,
    ) -> None:
        options = lib.Options(
            _choice(lib.DEVICES, device, "device"),
            0,
            threads,
            _choice(lib.DTYPES, dtype, "dtype"),
            _choice(lib.WEIGHTS, weights, "weights"),
        )
        self.library = lib.load(library)
        handle = c_void_p()
        status = self.library.kilat_open(str(path).encode(), byref(options), byref(handle))
        self.handle = handle.value
        self._closing = weakref.finalize(self, self.library.kilat_close, self.handle)
        self.check(status)
        self.info = self._info()

    def check(self, status: int) -> None:
        """Raise what a failed call on this model says."""
        _check(status, self.library.kilat_model_error(self.handle))

    def _info(self) -> ModelInfo:
        raw = lib.Info()
        self.check(self.library.kilat_model_info(self.handle, byref(raw)))
        return ModelInfo(
            architecture=raw.architecture.decode(),
            kernels=raw.kernels.decode(),
            vocab=raw.vocab,
            hidden=raw.hidden,
            layers=raw.layers,
            max_context=raw.max_context,
            parameters=raw.parameters,
            file_bytes=raw.file_bytes,
            dtype=lib.DTYPES[raw.dtype],
            weights=lib.WEIGHTS[raw.weights],
            bos_id=None if raw.bos_id < 0 else raw.bos_id,
            end_ids=tuple(raw.end_ids[: raw.n_end_ids]),
        )

    def session(
        self, context: int = 0, *, keep_layers: bool = False, run_ahead: bool = False
    ) -> "NativeSession":
        """An empty session of ``context`` tokens (0: the model's, at most 4096), all of its memory reserved.

        With ``keep_layers`` :meth:`NativeSession.layers` works, at a cost to every step. ``run_ahead`` is for streams: where a device can,
        a step is begun before the id it takes has come back; ids and everything else are the same.
        """
        flags = lib.KEEP_LAYERS * keep_layers | lib.RUN_AHEAD * run_ahead
        return NativeSession(self, lib.SessionOptions(context, flags))

    def memory(self, session: "NativeSession | None" = None) -> list[MemoryOwner]:
        """All memory of the model, and of ``session``, by owner."""
        owners, n = (lib.Memory * _MOST_OWNERS)(), c_int()
        at = None if session is None else session.handle
        _check(
            self.library.kilat_memory_report(self.handle, at, owners, _MOST_OWNERS, byref(n)),
            b"the memory report has more owners than there is room for",
        )
        return [MemoryOwner(o.owner.decode(), o.host_bytes, o.device_bytes) for o in owners[: n.value]]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of ``text`` with the tokenizer of a GGUF file; ``special`` recognises control tokens and adds BOS where wanted."""
        raw = text.encode("utf-8")
        # an id a byte at most, and normalization can make three of one
        ids, n = (c_int32 * (3 * len(raw) + 4))(), c_int64()
        self.check(self.library.kilat_encode(self.handle, raw, len(raw), special, ids, len(ids), byref(n)))
        return ids[: n.value]

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one id."""
        at, n = c_void_p(), c_int64()
        self.check(self.library.kilat_token_bytes(self.handle, token_id, byref(at), byref(n)))
        return ctypes.string_at(at.value, n.value) if at.value else b""

    def close(self) -> None:
        """Free the model."""
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class NativeSession:
    """One stream of tokens of a model; see :meth:`NativeModel.session`."""

    def __init__(self, model: NativeModel, options: lib.SessionOptions) -> None:
        self.model, self.library = model, model.library
        handle = c_void_p()
        status = self.library.kilat_session_create(model.handle, byref(options), byref(handle))
        self.handle = handle.value
        self._closing = weakref.finalize(self, self.library.kilat_session_close, self.handle)
        self._check(status)
        self._next = c_int32()

    def _check(self, status: int) -> None:
        if status:
            _check(status, self.library.kilat_session_error(self.handle))

    @property
    def n_tokens(self) -> int:
        return int(self.library.kilat_tokens(self.handle))

    @property
    def context(self) -> int:
        return int(self.library.kilat_context(self.handle))

    def prefill(self, ids: Sequence[int], sampling: Sampling | None = None) -> int | None:
        """Append ``ids`` (at least one); with ``sampling`` the id that follows. Raises RequestError, LimitError, EngineError."""
        array = (c_int32 * len(ids))(*ids)
        draw = byref(sampling.struct()) if sampling else None
        self._check(self.library.kilat_prefill(self.handle, array, len(array), draw, byref(self._next)))
        return self._next.value if sampling else None

    def step(self, token_id: int, sampling: Sampling | None = None) -> int | None:
        """Append one id; as :meth:`prefill`."""
        draw = byref(sampling.struct()) if sampling else None
        self._check(self.library.kilat_step(self.handle, token_id, draw, byref(self._next)))
        return self._next.value if sampling else None

    def sample(self, sampling: Sampling) -> int:
        """Draw from the logits of the last token."""
        self._check(self.library.kilat_sample(self.handle, byref(sampling.struct()), byref(self._next)))
        return self._next.value

    def logits(self) -> "memoryview[float]":
        """[vocab] fp32 of the last token, in new memory."""
        out = (c_float * self.model.info.vocab)()
        self._check(self.library.kilat_logits(self.handle, out))
        return memoryview(out).cast("B").cast("f")

    def layers(self) -> "memoryview[float]":
        """[layers + 1, hidden] fp32 of the last token, in new memory: what entered each layer, and what left the last one."""
        shape = (self.model.info.layers + 1, self.model.info.hidden)
        out = (c_float * (shape[0] * shape[1]))()
        self._check(self.library.kilat_layers(self.handle, out))
        return memoryview(out).cast("B").cast("f", shape)

    def rewind(self, n: int) -> None:
        """Forget all tokens but the first ``n``."""
        self._check(self.library.kilat_rewind(self.handle, n))

    def snapshot(self) -> bytes:
        """All that the session is, for :meth:`restore` of a session of the same model."""
        out, written = (
            ctypes.create_string_buffer(self.library.kilat_snapshot_bytes(self.handle)),
            c_int64(),
        )
        self._check(self.library.kilat_snapshot(self.handle, out, len(out), byref(written)))
        return out.raw[: written.value]

    def restore(self, data: bytes) -> None:
        """Become what the session of the snapshot was; empty when this raises."""
        self._check(self.library.kilat_restore(self.handle, data, len(data)))

    def close(self) -> None:
        """Free the session."""
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _choice(names: Sequence[str], name: str, what: str) -> int:
    if name not in names:
        raise ConfigError(f"{what} is {name!r}; known: {', '.join(names)}")
    return names.index(name)


def _check(status: int, text: bytes) -> None:
    if status != lib.OK:
        raise _ERRORS.get(status, EngineError)(text.decode("utf-8", "replace"))
