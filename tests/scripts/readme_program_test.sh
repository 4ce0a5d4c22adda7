#!/usr/bin/env bash
# Compiles the README's program against the installed lockstep, with the README's own CMakeLists.txt and commands, and
# runs it. From README.md it takes
#   the first ```cpp block with "int main"                                        -> main.cpp
#   the first ```cmake block with "find_package(lockstep"                         -> CMakeLists.txt
#   the first ```sh, ```bash or ```console block with "cmake --build", after it   -> run as it stands
#   the first ```cpp block with "SplitModel"                                      -> the body of a second program
# Each page of docs/guide becomes a part of the second program too: its ```cpp blocks, of which the last function that
# takes a Rank is run on 4 ranks, and then each one that takes nothing.
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

# And the loop over a SplitModel, with layers and a little data around it; then the guide's pages.
pages=("$(dirname "$readme")"/docs/guide/*.md)
functions=() programs=()
{
  cat <<'END'
#include <lockstep/lockstep.hpp>
#include <fstream>
#include <iostream>
namespace nn = torch::nn;
nn::Sequential my_layers() {
  return nn::Sequential(nn::Flatten(), nn::Linear(784, 32), nn::ReLU(), nn::Linear(32, 10));
}
lockstep::Dataset my_data() {
  return {torch::sin(torch::arange(400)).view({100, 4}), torch::arange(100) % 3};
}
END
  for page in "${pages[@]}"; do
    name=$(blocks "$page" | sed -n 's/^void \([a-z_]*\)(lockstep::Rank& rank) {.*/\1/p' | tail -n 1)
    [[ -n $name ]] || {
      echo "error: $page has no function of a Rank." >&2
      exit 1
    }
    functions+=("$name")
    while read -r program; do programs+=("of_$name::$program"); done < <(
      blocks "$page" | sed -n 's/^void \([a-z_]*\)() {.*/\1/p')
    printf 'namespace of_%s {\n%s\n}\n' "$name" "$(blocks "$page")"
  done
  cat <<'END'
int main() {
  const lockstep::ImageData data{{torch::zeros({512, 1, 28, 28}, torch::kByte), torch::zeros({512}, torch::kLong)}, {}, ""};
  lockstep::run(lockstep::parse_devices("4xcpu"), [&](lockstep::Rank& rank) {
END
  block "cpp c++" "SplitModel"
  for name in "${functions[@]}"; do echo "    of_$name::$name(rank);"; done
  echo "  });"
  for program in "${programs[@]}"; do echo "  $program();"; done
  echo "}"
} >split.cpp
cat >>CMakeLists.txt <<'END'
add_executable(split split.cpp)
target_link_libraries(split PRIVATE lockstep::lockstep)
END
cmake -B build && cmake --build build --target split
./build/split
