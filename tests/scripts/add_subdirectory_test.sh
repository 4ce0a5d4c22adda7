#!/usr/bin/env bash
# Configures a project that adds lockstep by add_subdirectory(), and one that does so by FetchContent from a folder, without
# the network. Builds the one object that is each project's own.
#   add_subdirectory_test.sh WORK-FOLDER TORCH_DIR
set -euo pipefail
work=$1 torch=$2
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

rm -rf "$work"
mkdir -p "$work"
cat >"$work/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.25)
project(adds_lockstep LANGUAGES CXX)
if(FETCHCONTENT_SOURCE_DIR_LOCKSTEP)
  include(FetchContent)
  FetchContent_Declare(lockstep GIT_REPOSITORY https://nowhere.invalid/lockstep.git)
  FetchContent_MakeAvailable(lockstep)
else()
  add_subdirectory($source lockstep)
endif()
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
configure_and_compile() { # BUILD-FOLDER [SETTING]
  cmake -G Ninja -S "$work" -B "$work/$1" -DTorch_DIR="$torch" -DLOCKSTEP_CUDA=OFF "${@:2}"
  cmake --build "$work/$1" --target CMakeFiles/program.dir/main.cpp.o
}
configure_and_compile build
configure_and_compile fetched -DFETCHCONTENT_SOURCE_DIR_LOCKSTEP="$source"
