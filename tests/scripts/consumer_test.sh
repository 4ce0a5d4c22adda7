#!/usr/bin/env bash
# Builds examples/consumer against the installed lockstep, as a stranger would, and checks what it prints.
#   consumer_test.sh PREFIX WORK-FOLDER
set -euo pipefail
prefix=$1 work=$2
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../examples/consumer" && pwd)

rm -rf "$work"
unset Torch_DIR Torch_ROOT CMAKE_PREFIX_PATH # the package itself must know its LibTorch
cmake -S "$source" -B "$work" -DCMAKE_PREFIX_PATH="$prefix"
cmake --build "$work"

expected="2 ranks: w = 3.00, b = -1.00"
printed=$("$work/consumer")
if [[ $printed != "$expected" ]]; then
  echo "error: the consumer printed '$printed', not '$expected'."
  exit 1
fi
if grep -rq cmake_pch "$work"; then
  echo "error: lockstep's precompiled header reached its consumer."
  exit 1
fi
if [[ -e $prefix/bin/lockstep ]]; then
  (cd / && env -u LD_LIBRARY_PATH "$prefix/bin/lockstep" devices) || {
    echo "error: the installed program does not run."
    exit 1
  }
fi
echo "the consumer printed '$printed'"
