#!/usr/bin/env bash
# Builds examples/consumer against the installed lockstep, as a stranger would, and checks what it prints. It links
# LibTorch alone, and runs without the libraries that lockstep loads when it needs them. Then builds programs that use the
# other components, each with its own header alone, one that uses data, a plug-in and a shared library that hold two
# libraries, a program with pkg-config's flags, and a Python module. These are built with LOCKSTEP_OTHER_CXX if it is set,
# which may need a third of the system's compiler's time.
#   consumer_test.sh PREFIX WORK-FOLDER
set -euo pipefail
prefix=$1 work=$2
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../examples/consumer" && pwd)

rm -rf "$work"
unset Torch_DIR Torch_ROOT CMAKE_PREFIX_PATH # the package itself must know its LibTorch
cmake -S "$source" -B "$work" -DCMAKE_PREFIX_PATH="$prefix" \
  -DCMAKE_DISABLE_FIND_PACKAGE_{CURL,OpenSSL,ZLIB,nlohmann_json}=ON
cmake --build "$work"
if readelf -d "$work/consumer" | grep NEEDED | grep -vE '\[lib(torch|torch_cpu|torch_cuda|c10|c10_cuda|stdc\+\+|m|gcc_s|pthread|dl|c)\.so|\[ld-linux'; then
  echo "error: the consumer needs more than LibTorch and the compiler's libraries."
  exit 1
fi

mkdir "$work/broken" # files that nothing can load, in front of the system's
touch "$work"/broken/lib{crypto.so.3,crypto.so.1.1,z.so.1}
expected="2 ranks: w = 3.00, b = -1.00"
printed=$(LD_LIBRARY_PATH=$work/broken "$work/consumer")
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
  # One version: the program's, the package's, and the newest that the changelog describes.
  of_program=$("$prefix/bin/lockstep" --version | cut -d ' ' -f 2)
  of_package=$(find "$prefix" -name lockstepConfigVersion.cmake -exec sed -n 's/^set(PACKAGE_VERSION "\(.*\)")/\1/p' {} +)
  of_changelog=$(sed -n 's/^## \[\([0-9.]*\)\].*/\1/p' "$(dirname "${BASH_SOURCE[0]}")/../../CHANGELOG.md" | head -n 1)
  if [[ $of_program != "$of_package" || $of_program != "$of_changelog" ]]; then
    echo "error: the program is version $of_program, the package $of_package, and CHANGELOG.md ends with $of_changelog."
    exit 1
  fi
fi
[[ -z ${LOCKSTEP_OTHER_CXX:-} ]] || export CXX=$LOCKSTEP_OTHER_CXX
mkdir "$work/wings"
cat >"$work/wings/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.25)
project(wings LANGUAGES CXX)
find_package(lockstep REQUIRED COMPONENTS models book split lab survive fit everything)
find_package(lockstep QUIET COMPONENTS none_such)
if(lockstep_FOUND)
  message(FATAL_ERROR "find_package(lockstep) found a component that there is not")
endif()
foreach(wing models book split lab survive fit)
  add_executable(${wing} ${wing}.cpp)
  target_link_libraries(${wing} PRIVATE lockstep::${wing})
  if(wing STREQUAL "models") # LibTorch's headers once, since they take 10 seconds
    target_precompile_headers(models PRIVATE <torch/torch.h>)
  else()
    target_precompile_headers(${wing} REUSE_FROM models)
  endif()
endforeach()
END
wing_main() { # WING STATEMENT
  printf '#include <lockstep/%s.hpp>\n#include <iostream>\nint main() { std::cout << (%s) << "\\n"; }\n' "$1" "$2" >"$work/wings/$1.cpp"
}
wing_main models 'lockstep::LeNet()->parameters().size()'
wing_main book '!lockstep::try_all_gpus().empty()'
wing_main split 'lockstep::mesh_shapes(4).size()'
wing_main lab 'lockstep::to_string(lockstep::OptimizerKind::lamb)'
wing_main survive 'lockstep::elastic({}, {}) == nullptr'
wing_main fit 'lockstep::TrainOptions().epochs'
cmake -S "$work/wings" -B "$work/wings/build" -DCMAKE_PREFIX_PATH="$prefix"
cmake --build "$work/wings/build"
said=$(cd "$work/wings/build" && ./models && ./book && ./split && ./lab && ./survive && ./fit)
if [[ $said != $'8\n1\n6\nlamb\n1\n10' ]]; then
  echo "error: the wings said '$said'."
  exit 1
fi
mkdir "$work/data"
cat >"$work/data/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.25)
project(downloads LANGUAGES CXX)
find_package(lockstep REQUIRED COMPONENTS data)
add_executable(downloads main.cpp)
target_link_libraries(downloads PRIVATE lockstep::data)
END
cat >"$work/data/main.cpp" <<'END'
#include <lockstep/base/error.hpp>
#include <lockstep/data/fetch_data.hpp>

#include <iostream>

int main() try {
  lockstep::fetch_fashion_mnist(".", {.base_urls = {"file:///nowhere"}});
} catch (const lockstep::Error& error) {
  std::cout << error.what() << "\n";
}
END
cmake -S "$work/data" -B "$work/data/build" -DCMAKE_PREFIX_PATH="$prefix"
cmake --build "$work/data/build"
said=$("$work/data/build/downloads")
if [[ $said != *"cannot download train-images-idx3-ubyte.gz"*"file:///nowhere"* ]]; then
  echo "error: the component data said '$said'."
  exit 1
fi
cmake -S "$(dirname "${BASH_SOURCE[0]}")/plugin" -B "$work/plugin" -DCMAKE_PREFIX_PATH="$prefix"
cmake --build "$work/plugin"
said=$("$work/plugin/host" "$work/plugin/libplugin.so" 2>&1)
if [[ $said != $'3.00 error\n3.00 error' ]]; then
  echo "error: the plug-in, loaded twice, said '$said'."
  exit 1
fi
said=$("$work/plugin/program")
if [[ $said != 3.00 ]]; then
  echo "error: the program that links the shared library said '$said'."
  exit 1
fi
if command -v pkg-config >/dev/null; then
  cat >"$work/trains.cpp" <<'END'
#include <lockstep/fit.hpp>
#include <cstdio>
int main() try {
  lockstep::TrainOptions options;
  options.epochs = -1;
  lockstep::train(options);
} catch (const lockstep::Error&) {
  std::puts("refused");
}
END
  flags=$(PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name lockstep.pc)") pkg-config --cflags --libs lockstep)
  # shellcheck disable=SC2086  # flags are words
  "${CXX:-c++}" "$work/trains.cpp" -o "$work/trains" $flags
  said=$("$work/trains")
  if [[ $said != refused ]]; then
    echo "error: the program that has its flags from pkg-config said '$said'."
    exit 1
  fi
fi
python=/usr/bin/python3
if [[ -e $("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h ]]; then
  cmake -S "$source/../python_module" -B "$work/python" -DCMAKE_PREFIX_PATH="$prefix" -DPython_EXECUTABLE="$python"
  cmake --build "$work/python"
  said=$(PYTHONPATH=$work/python "$python" -c 'import line; losses = line.train("2xcpu"); print(len(losses), losses[-1] < 0.01 < losses[0])')
  if [[ $said != "10 True" ]]; then
    echo "error: the Python module said '$said'."
    exit 1
  fi
fi
echo "the consumer printed '$printed'"
