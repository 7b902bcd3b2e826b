"""The kernels of AMX on machines without its tiles: with a model of the instructions in their place, or with a model that steps in where
the processor stops at one. Both need AVX-512 bf16, which the rest of these kernels use."""

import ctypes
from functools import cache

from kilat.ops.cpu.build import build_library, cpu_units
from kilat.ops.cpu.library import load

AVX512_BF16, AMX = 3, 4
USED, ABSENT, REFUSED, UNSOUND = range(4)
# kinds of machine that native/tests/amx/amx_model.h can be
FAULTS = {
    "whole": USED,
    "absent": ABSENT,
    "refused": REFUSED,
    "permitted in words only": UNSOUND,
    "wrong products": UNSOUND,
    "bits of many rows differ": UNSOUND,
    "bits of a second tile differ": UNSOUND,
    "wrong products of bytes": UNSOUND,
}
_FOLDER = "../tests/amx"


def model_units() -> dict[str, list[str]]:
    """The files of native/cpu, with those of the model for two of them."""
    return _with({name: f"{_FOLDER}/{name}" for name in ("isa_amx.cpp", "amx_machine.cpp")})


@cache
def model_library() -> ctypes.CDLL:
    """Built once; the rest of it is compiled together with the real library."""
    library = _library(model_units())
    library.kilat_model_try.argtypes, library.kilat_model_try.restype = [ctypes.c_int], ctypes.c_int
    return library


@cache
def traps_library() -> ctypes.CDLL:
    """The machine code of AMX as it is. From ``kilat_traps_begin`` on this process does not die of it."""
    return _library(_with({"amx_machine.cpp": f"{_FOLDER}/amx_traps.cpp"}))


def _with(replaced: dict[str, str]) -> dict[str, list[str]]:
    return {replaced.get(name, name): flags for name, flags in cpu_units().items()}


def _library(units: dict[str, list[str]]) -> ctypes.CDLL:
    library = load(build_library("the CPU kernels on a model of AMX", units))
    library.kilat_model_products.restype = ctypes.c_int64
    library.kilat_model_begun.restype = ctypes.c_int
    return library
