#!/bin/sh
# Builds the CUDA backend alone, with what its tests and measurements need, as one shared library.
#   native/cuda/build.sh [OUT.so]      default: build/native/libkilat_cuda.so; variables NVCC, CXX, ARCH (sm_90), FLAGS
set -eu
cd "$(dirname "$0")/../.."
out=${1:-build/native/libkilat_cuda.so}
arch=${ARCH:-sm_90}
nvcc=${NVCC:-nvcc}
objects=$(dirname "$out")/objects
mkdir -p "$objects"
pids=
for source in native/cuda/step.cu native/cuda/prompt.cu native/cuda/pack.cu native/cuda/model.cu native/cuda/session.cu native/cuda/backend.cu \
  native/tests/cuda_check.cu native/tests/fail.cpp native/runtime/rope.cpp native/runtime/formats.cpp; do
  "$nvcc" -std=c++17 -O3 -lineinfo -gencode="arch=compute_${arch#sm_},code=$arch" ${FLAGS:-} -Xcompiler -Wall,-fPIC -x cu -c "$source" \
    -o "$objects/$(basename "${source%.*}").o" &
  pids="$pids $!"
done
for pid in $pids; do wait "$pid"; done
"$nvcc" -shared -o "$out" "$objects"/*.o
