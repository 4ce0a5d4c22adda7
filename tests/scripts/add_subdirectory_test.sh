#!/usr/bin/env bash
# Configures a project that adds lockstep by add_subdirectory(), and builds the one object that is its own.
#   add_subdirectory_test.sh WORK-FOLDER TORCH_DIR
set -euo pipefail
work=$1 torch=$2
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

rm -rf "$work"
mkdir -p "$work"
cat >"$work/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.25)
project(adds_lockstep LANGUAGES CXX)
add_subdirectory($source lockstep)
add_executable(program main.cpp)
target_link_libraries(program PRIVATE lockstep::everything)
if(TARGET lockstep::data)
  target_link_libraries(program PRIVATE lockstep::data)
endif()
END
cat >"$work/main.cpp" <<'END'
#include <ATen/core/TensorBase.h>
#include <lockstep/base/error.hpp>

int main() {
  throw lockstep::Error(at::TensorBase().toString());
}
END
cmake -G Ninja -S "$work" -B "$work/build" -DTorch_DIR="$torch" -DLOCKSTEP_CUDA=OFF
cmake --build "$work/build" --target CMakeFiles/program.dir/main.cpp.o
