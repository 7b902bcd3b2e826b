"""ctypes declarations of native/cpu/kilat_cpu.h and kilat_layers.h."""

import ctypes
from ctypes import c_char_p, c_double, c_int, c_int64, c_void_p
from pathlib import Path

from kilat.base.errors import ConfigError
from kilat.ops.cpu.build import build

ABI = 7
F32, BF16 = 0, 1
MAX_HEAD_DIM = 256
MAX_PARTS = 8


class BlockRows(ctypes.Structure):
    """``kilat_blocks``."""

    _fields_ = [("type", c_int), ("data", c_void_p), ("row_bytes", c_int64), ("n", c_int64)]


class KvView(ctypes.Structure):
    """``kilat_kv``: one layer's view of the page pool; strides in elements."""

    _fields_ = [
        ("base", c_void_p),
        ("page_stride", c_int64),
        ("side_stride", c_int64),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("page_tokens", c_int64),
    ]


class HeadShape(ctypes.Structure):
    """``kilat_heads``."""

    _fields_ = [("n_q", c_int64), ("n_kv", c_int64), ("dim", c_int64), ("rotary", c_int64)]


class SampleFilter(ctypes.Structure):
    """``kilat_filter``."""

    _fields_ = [
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("u", c_double),
        ("top_k", c_int64),
    ]


class Rows(ctypes.Structure):
    """``kilat_rows``: the rows of a step."""

    _fields_ = [
        ("row_start", c_void_p),
        ("kv_len", c_void_p),
        ("page_table", c_void_p),
        ("rows", c_int64),
        ("table_stride", c_int64),
    ]


_P, _I, _L, _D = c_void_p, c_int, c_int64, c_double
_SIGNATURES = {
    "kilat_cpu_abi": (_I, []),
    "kilat_cpu_best_isa": (_I, []),
    "kilat_cpu_isa_name": (c_char_p, [_I]),
    "kilat_cpu_amx_note": (c_char_p, []),
    "kilat_cpu_create": (_P, [_I, _I]),
    "kilat_cpu_destroy": (None, [_P]),
    "kilat_linear_pack": (_P, [_P, _I, _P, _L, _L, _L, _P]),
    "kilat_block_values": (_I, [_I]),
    "kilat_block_bytes": (_I, [_I]),
    "kilat_linear_pack_quant": (_P, [_P, _P, _I, _L, _P, _P]),
    "kilat_linear_gather": (_I, [_P, _P, _P, _L, _P]),
    "kilat_linear_free": (None, [_P]),
    "kilat_linear_bytes": (_L, [_P]),
    "kilat_linear_run": (_I, [_P, _P, _P, _L, _L, _P]),
    "kilat_gated_linear_can": (_I, [_P]),
    "kilat_gated_linear_run": (_I, [_P, _P, _P, _L, _L, _P]),
    "kilat_rms_norm": (None, [_P, _I, _P, _L, _L, _L, _P, _D, _P]),
    "kilat_add_rms_norm": (None, [_P, _I, _P, _L, _P, _L, _L, _P, _D, _P]),
    "kilat_silu_mul": (None, [_P, _I, _P, _L, _L, _L, _P]),
    "kilat_greedy": (None, [_P, _I, _P, _L, _L, _L, _P, _P]),
    "kilat_sample_rows": (_I, [_P, _P, _L, _L, _L, _P, _P]),
    "kilat_rope_write": (None, [_P, _I, _P, _L, _L, _P, _P, _P, _P, _P, _P, _P, _D, _P]),
    "kilat_attention": (_I, [_P, _I, _P, _P, _P, _P, _D, _L, _P]),
    "kilat_layers_room": (_L, [_P, _L, _L]),
    "kilat_layers_run": (_I, [_P, _P, _P, _P, _P, _P]),
}


def load(path: Path | None = None) -> ctypes.CDLL:
    """The library with all signatures declared, from ``path`` or built first if needed. Raises ConfigError when that is not possible."""
    path = path or build()
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise ConfigError(f"the built CPU kernels cannot be loaded: {error}; remove {path}") from error
    if library.kilat_cpu_abi() != ABI:
        raise ConfigError(f"CPU kernels of version {library.kilat_cpu_abi()}, need {ABI}: remove {path}")
    return library
