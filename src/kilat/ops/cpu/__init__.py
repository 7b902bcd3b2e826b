"""ops/cpu: the ops on native CPU kernels (native/cpu), built at first use and called through ctypes.

Reading order: build (sources to a cached shared library), library (ctypes declarations), kernels (the set that the engine takes).
"""
