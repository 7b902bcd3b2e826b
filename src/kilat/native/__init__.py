"""native: the single-stream runtime of native/ (C and C++, no torch), built at first use and called through ctypes.

Reading order: build (sources to a cached shared library), library (ctypes declarations of kilat.h), runtime (models and sessions).
"""
