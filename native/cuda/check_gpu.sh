#!/bin/sh
# Builds the CUDA backend, checks it against torch and measures it, on a machine with a CUDA device, nvcc and a python3 with torch.
#   native/cuda/check_gpu.sh [FOLDER for results; default $OUT or .]
set -u
cd "$(dirname "$0")/../.."
out=${1:-${OUT:-.}}
export PYTHONPATH=src:. PYTHONUNBUFFERED=1
began=$(date +%s)
passed() { echo "== $1 after $(($(date +%s) - began)) s"; }

# the path without bulk copies, which older devices take, is run here too
FLAGS=-DKILAT_NO_BULK sh native/cuda/build.sh build/native/no_bulk/libkilat_cuda.so &
sh native/cuda/build.sh || exit 1
wait
passed "built"
timeout 120 python3 -m pytest -q --maxfail 6 --tb short -m gpu -p no:cacheprovider --timeout 100 tests/native/test_cuda_step.py 2>&1 | tail -60
passed "checked"
timeout 100 python3 bench/native_gpu.py --out "$out/native_gpu.json"
passed "measured"
timeout 60 python3 bench/native_gpu.py --models 1b --formats bf16 --steps 300 --library build/native/no_bulk/libkilat_cuda.so
passed "measured without bulk copies"
