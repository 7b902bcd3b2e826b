"""CUDA C++ kernels for Hopper, compiled at run time.

Reading order: product.cu (the kernel), compile (sources to cubins in the cache folder), driver (ctypes declarations of libcuda), product
(its variants, and launches of them).
"""
