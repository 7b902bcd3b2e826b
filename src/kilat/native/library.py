"""ctypes declarations of native/include/kilat.h."""

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path

from kilat.base.errors import ConfigError
from kilat.native.build import build

VERSION = 1
OK, BAD_ARGUMENT, BAD_FILE, UNSUPPORTED, NO_MEMORY, CONTEXT_FULL = range(6)
TOO_SMALL = 9
DEVICES = ("cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")
WEIGHTS = ("auto", "stored", "wide")
KEEP_LAYERS, RUN_AHEAD = 1, 2


class Options(ctypes.Structure):
    """``kilat_options``."""

    _fields_ = [
        ("device", c_int32),
        ("device_index", c_int32),
        ("threads", c_int32),
        ("dtype", c_int32),
        ("weights", c_int32),
    ]


class Info(ctypes.Structure):
    """``kilat_info``."""

    _fields_ = [
        ("architecture", c_char_p),
        ("kernels", c_char_p),
        ("vocab", c_int64),
        ("hidden", c_int64),
        ("inner", c_int64),
        ("layers", c_int64),
        ("q_heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("max_context", c_int64),
        ("parameters", c_int64),
        ("file_bytes", c_int64),
        ("dtype", c_int32),
        ("weights", c_int32),
        ("bos_id", c_int32),
        ("n_end_ids", c_int32),
        ("end_ids", POINTER(c_int32)),
    ]


class Memory(ctypes.Structure):
    """``kilat_memory``."""

    _fields_ = [("owner", c_char_p), ("host_bytes", c_int64), ("device_bytes", c_int64)]


class SessionOptions(ctypes.Structure):
    """``kilat_session_options``."""

    _fields_ = [("context", c_int64), ("flags", c_int64)]


class SamplingStruct(ctypes.Structure):
    """``kilat_sampling``."""

    _fields_ = [
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("top_k", c_int64),
        ("seed", c_uint64),
    ]


_P, _I, _L = c_void_p, c_int, c_int64
_IDS, _DRAW = POINTER(c_int32), POINTER(SamplingStruct)
_SIGNATURES = {
    "kilat_version": (_I, []),
    "kilat_status_name": (c_char_p, [_I]),
    "kilat_open": (_I, [c_char_p, POINTER(Options), POINTER(_P)]),
    "kilat_close": (None, [_P]),
    "kilat_model_error": (c_char_p, [_P]),
    "kilat_session_error": (c_char_p, [_P]),
    "kilat_model_info": (_I, [_P, POINTER(Info)]),
    "kilat_memory_report": (_I, [_P, _P, POINTER(Memory), _I, POINTER(_I)]),
    "kilat_session_create": (_I, [_P, POINTER(SessionOptions), POINTER(_P)]),
    "kilat_session_close": (None, [_P]),
    "kilat_tokens": (_L, [_P]),
    "kilat_context": (_L, [_P]),
    "kilat_prefill": (_I, [_P, _P, _L, _DRAW, _IDS]),
    "kilat_step": (_I, [_P, c_int32, _DRAW, _IDS]),
    "kilat_sample": (_I, [_P, _DRAW, _IDS]),
    "kilat_logits": (_I, [_P, _P]),
    "kilat_layers": (_I, [_P, _P]),
    "kilat_rewind": (_I, [_P, _L]),
    "kilat_snapshot_bytes": (_L, [_P]),
    "kilat_snapshot": (_I, [_P, _P, _L, POINTER(_L)]),
    "kilat_restore": (_I, [_P, c_char_p, _L]),
    "kilat_encode": (_I, [_P, c_char_p, _L, _I, _P, _L, POINTER(_L)]),
    "kilat_token_bytes": (_I, [_P, c_int32, POINTER(_P), POINTER(_L)]),
}


def load(path: Path | None = None) -> ctypes.CDLL:
    """The library with all signatures declared; built first if needed, or the one at ``path``, which ``make -C native`` built (with CUDA
    where that was asked for). Raises ConfigError when that is not possible."""
    fix = "build it with `make -C native`" if path else "remove it"
    path = path or build()
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise ConfigError(f"the native runtime {path} cannot be loaded ({error}): {fix}") from error
    if library.kilat_version() != VERSION:
        raise ConfigError(
            f"the native runtime {path} has version {library.kilat_version()}, need {VERSION}: {fix}"
        )
    return library
