"""Builds the runtime and the CPU kernels under it into one shared library in the cache folder, once per version of its sources."""

from pathlib import Path

from kilat.base.errors import ConfigError
from kilat.ops.cpu.build import build_library, cpu_units, source_dir


def build() -> Path:
    """Path of the library; seconds when it is not in the cache. Raises ConfigError with the reason when it cannot be built."""
    kernels = source_dir()
    folder = None if kernels is None else kernels.parent / "runtime"
    files = sorted(folder.glob("*.cpp")) if folder else []
    if not files:
        raise ConfigError(
            "the sources of the native runtime (native/runtime) are not installed beside kilat: install it again"
        )
    # -O3: the conversion of weights at start-up is loops that only this level makes vectors of
    units = cpu_units() | {f"../runtime/{file.name}": ["-O3"] for file in files}
    return build_library("the native runtime", units)
