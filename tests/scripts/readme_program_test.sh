#!/usr/bin/env bash
# Compiles the README's program against the installed lockstep, with the README's own CMakeLists.txt and commands, and
# runs it. From README.md it takes
#   the first ```cpp block with "int main"                                        -> main.cpp
#   the first ```cmake block with "find_package(lockstep"                         -> CMakeLists.txt
#   the first ```sh, ```bash or ```console block with "cmake --build", after it   -> run as it stands
#   the first ```cpp block with "SplitModel"                                      -> the body of a second program
# Each page of docs with ```cpp blocks becomes a part of the second program too. Of these blocks each function that takes
# a Rank is run on 4 ranks, and then each one that takes nothing. The elastic loop is run once more, in an elastic job of
# which a process is killed.
#   readme_program_test.sh PREFIX WORK-FOLDER
set -euo pipefail
prefix=$1 work=$2
readme=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/README.md

# block LANGUAGES TEXT: the first fenced block in one of these languages that contains the text.
block() {
  awk -v languages="$1" -v text="$2" '
    !inside && /^ *```/ {
      language = $0; sub(/^ *```/, "", language); sub(/[^a-z+].*/, "", language)
      inside = 1; wanted = index(" " languages " ", " " language " "); body = ""; next
    }
    inside && /^ *```/ { if (wanted && index(body, text)) { printf "%s", body; found = 1; exit } inside = 0; next }
    inside { body = body $0 "\n" }
    END { exit !found }' "$readme" || {
    echo "error: $readme has no block (\`\`\`$1) that contains '$2'." >&2
    exit 1
  }
}

[[ -f $readme ]] || {
  echo "error: there is no $readme."
  exit 1
}
rm -rf "$work"
mkdir -p "$work"
cd "$work"
block "cpp c++" "int main" >main.cpp
block "cmake" "find_package(lockstep" >CMakeLists.txt
block "sh bash console" "cmake --build" | sed 's/^\$ //' >commands.sh

echo "running in $work:"
cat commands.sh
unset Torch_DIR Torch_ROOT
export CMAKE_PREFIX_PATH=$prefix
bash -euxo pipefail commands.sh

# blocks FILE: all of its C++ blocks.
blocks() {
  awk '/^```/ { inside = ($0 == "```cpp") && !inside; next } inside' "$1"
}

# And the loop over a SplitModel, with layers and a little data around it; then the pages.
mapfile -t pages < <(grep -rl --include='*.md' '^```cpp' "$(dirname "$readme")/docs" | sort)
functions=() programs=()
{
  cat <<'END'
#include <lockstep/everything.hpp>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
namespace nn = torch::nn;
nn::Sequential my_layers() {
  return nn::Sequential(nn::Flatten(), nn::Linear(784, 32), nn::ReLU(), nn::Linear(32, 10));
}
END
  blocks "$(dirname "$readme")/docs/guide/own-data.md" | sed -n '/^lockstep::Dataset my_data()/,/^}/p'
  for page in "${pages[@]}"; do
    room=of_$(basename "$page" .md | tr - _)
    names=$(blocks "$page" | sed -n 's/^void \([a-z_0-9]*\)(\(lockstep::Rank& rank\|\)) {.*/\1 \2/p')
    [[ -n $names ]] || {
      echo "error: $page has no function that could be run." >&2
      exit 1
    }
    while read -r name argument; do
      if [[ -n $argument ]]; then functions+=("$room::$name"); else programs+=("$room::$name"); fi
    done <<<"$names"
    printf 'namespace %s {\n%s\n}\n' "$room" "$(blocks "$page" | sed '/^lockstep::Dataset my_data()/,/^}/d')"
  done
  cat <<'END'
int main(int argc, char**) {
  if (argc > 1) return of_elastic_loop::train_elastically(), 0;
  const lockstep::ImageData data{{torch::zeros({512, 1, 28, 28}, torch::kByte), torch::zeros({512}, torch::kLong)}, {}, ""};
  lockstep::run(lockstep::parse_devices("4xcpu"), [&](lockstep::Rank& rank) {
END
  block "cpp c++" "SplitModel"
  for name in "${functions[@]}"; do echo "    $name(rank);"; done
  echo "  });"
  for program in "${programs[@]}"; do echo "  $program();"; done
  echo "}"
} >split.cpp
cat >>CMakeLists.txt <<'END'
find_package(lockstep REQUIRED COMPONENTS everything)
add_executable(split split.cpp)
target_link_libraries(split PRIVATE lockstep::everything)
END
cmake -B build && cmake --build build --target split
./build/split

# One of two processes is killed, and the weights are those of the run above.
mv elastic-loop.safetensors alone.safetensors
"$prefix/bin/lockstep" launch -n 2 --elastic ./build/split elastic >elastic.log 2>&1 &
launcher=$!
for ((i = 0; i < 6000; ++i)); do
  grep -q "step 100$" elastic.log && break
  sleep 0.01
done
for child in $(cat "/proc/$launcher/task/$launcher/children"); do
  if [[ $(cat "/proc/$child/comm") == split ]]; then
    kill -9 "$child"
    break
  fi
done
wait "$launcher" || { cat elastic.log; exit 1; }
grep "the others go on without it" elastic.log
cmp alone.safetensors elastic-loop.safetensors
