#!/bin/sh
# Builds the runtime with the CUDA backend alone, for a device that is emulated on the host: build.sh OUT.so; variable CXX.
set -eu
cd "$(dirname "$0")/../../.."
out=$1
objects=$(dirname "$out")/emulated-objects
mkdir -p "$objects"
rm -f "$objects"/*.o
pids=
compile() {  # level of optimization, sources
  level=$1
  shift
  for source in "$@"; do
    "${CXX:-g++}" -std=c++17 "$level" -fPIC -fno-strict-aliasing -Wall -Wno-unknown-pragmas -DKILAT_EMULATED -Inative/tests/emulated -x c++ -c "$source" \
      -o "$objects/$(basename "$source").o" &
    pids="$pids $!"
  done
}
compile -O2 native/cuda/*.cu native/tests/emulated/*.cpp
compile -O1 $(ls native/runtime/*.cpp | grep -v /cpu_)
for pid in $pids; do wait "$pid"; done
"${CXX:-g++}" -shared -o "$out" "$objects"/*.o
