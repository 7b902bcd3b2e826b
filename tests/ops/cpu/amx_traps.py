"""Run as a script: products of AMX's machine code, stopped at every tile instruction, and of the model; ends with status 1 where a bit
differs. A process of its own, for its handler of SIGILL."""

import sys

import torch

from kilat.ops.cpu.kernels import cpu_kernels
from tests.ops.cpu import amx
from tests.ops.cpu.block_cases import TYPES, blocks, type_name
from tests.ops.cpu.cases import different_bits, normal

BF16 = torch.bfloat16
ROWS = (1, 2, 5, 16, 17, 40, 130)


def main() -> int:
    traps = amx.traps_library()
    if traps.kilat_cpu_best_isa() != amx.AMX:
        print("the check of the tiles failed")
        return 1
    traps.kilat_traps_begin()
    real = cpu_kernels(3, isa=amx.AMX, library=traps)
    model = cpu_kernels(1, isa=amx.AMX, library=amx.model_library())
    for n, k in ((192, 96), (70, 75), (64, 1), (33, 32)):
        x, weight, bias = (normal(i, *s, dtype=BF16) for i, s in enumerate([(max(ROWS), k), (n, k), (n,)]))
        packed = [kernels.pack_linear(weight, bias) for kernels in (real, model)]
        plain = [kernels.pack_linear(weight) for kernels in (real, model)]
        for rows in ROWS:
            for ours, theirs in (
                (real.linear(x[:rows], packed[0]), model.linear(x[:rows], packed[1])),
                (real.fused_gate(x[:rows], plain[0]), model.fused_gate(x[:rows], plain[1])),
            ):
                if different := different_bits(ours, theirs, k):
                    print(f"{n} x {k}, {rows} rows: {different}")
                    return 1
    for ggml_type in TYPES:
        x, parts = normal(1, max(ROWS), 512, dtype=BF16), [blocks(ggml_type, 75, 512, seed=2)]
        ours, theirs = (kernels.linear(x, kernels.blocks.pack(parts, None)) for kernels in (real, model))
        if different := different_bits(ours, theirs, ggml_type):
            print(f"{type_name(ggml_type)}: {different}")
            return 1
    if traps.kilat_model_products() == 0 or traps.kilat_model_begun() != 0:
        print("tiles were not used, or are still in use")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
