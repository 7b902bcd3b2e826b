"""ops/triton: the CUDA kernel set. One file per op with the stem of its contract in ``ops/``; ``kernels`` puts the set together.

Every kernel can be captured in a CUDA graph: sizes that change from step to step are read from device tensors, the host only knows
upper bounds. Kernels follow each other by programmatic dependent launch (see ``launch``).
"""
