"""CUDA C++ kernels for Hopper, compiled at run time, where they measured better than Triton's.

Reading order: attention_decode.cu (the kernel), ptx.cuh (the instructions it uses), compile (sources to cubins in the cache folder), driver
(ctypes declarations of libcuda), attention_decode (its variants, and launches of them).
"""
