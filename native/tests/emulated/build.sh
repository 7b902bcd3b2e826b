#!/bin/sh
# Builds the CUDA backend for a device that is emulated on the host: build.sh OUT.so; variable CXX.
set -eu
cd "$(dirname "$0")/../../.."
out=$1
objects=$(dirname "$out")/emulated-objects
mkdir -p "$objects"
pids=
for source in native/cuda/step.cu native/cuda/prompt.cu native/cuda/pack.cu native/cuda/model.cu native/cuda/session.cu native/cuda/backend.cu \
  native/tests/emulated/emulated.cpp native/tests/fail.cpp native/runtime/rope.cpp; do
  "${CXX:-g++}" -std=c++17 -O2 -fPIC -Wall -Wno-unknown-pragmas -DKILAT_EMULATED -Inative/tests/emulated -x c++ -c "$source" \
    -o "$objects/$(basename "${source%.*}").o" &
  pids="$pids $!"
done
for pid in $pids; do wait "$pid"; done
"${CXX:-g++}" -shared -o "$out" "$objects"/*.o
