#!/usr/bin/env bash
# What ./dev does before it builds: help, unknown commands, and packages that are missing, with stand-ins for
# dpkg-query, id, sudo and apt-get.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
dev=$root/dev
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
  echo "error: $1. ./dev said:"
  cat "$work/said"
  exit 1
}
run_dev() { "$dev" "$@" >"$work/said" 2>&1 </dev/null; }
expect_said() { grep -qF -- "$1" "$work/said" || fail "it did not say '$1'"; }
stand_in() { # NAME BODY
  printf '#!/bin/bash\n%s\n' "$2" >"$work/bin/$1"
  chmod +x "$work/bin/$1"
}

run_dev help || fail "help failed"
for command in train test nightly test-gpu build docs wheel lint clean; do expect_said "./dev $command"; done
code=0
run_dev trian || code=$?
((code == 2)) || fail "an unknown command ended with code $code, not 2"
expect_said "unknown command 'trian'"

mkdir "$work/bin"
export PATH=$work/bin:$PATH
# shellcheck disable=SC2016  # the stand-ins' own variables
stand_in dpkg-query 'for name; do [[ $name == -* || $name == ninja-build || $name == ccache ]] || echo "$name:installed"; done; echo "ccache:config-files"'
stand_in id 'echo 1000'
install="apt-get install -y --no-install-recommends ninja-build ccache"

stand_in sudo 'exit 1'
if run_dev build; then fail "it went on without packages"; fi
expect_said "apt-get update && $install"

# shellcheck disable=SC2016
stand_in sudo '[[ $1 == -n ]] && shift; echo "$*" >>'"$work/sudo.log"'; [[ $* != *" install "* ]] || { echo "E: no such thing"; exit 100; }'
if run_dev build; then fail "it went on after a failed installation"; fi
expect_said "this step failed: installing packages: ninja-build ccache"
expect_said "E: no such thing"
expect_said "build/logs/apt-install.log"

# shellcheck disable=SC2016
stand_in sudo '[[ $1 == -n ]] && shift; echo "$*" >>'"$work/sudo.log"
rm "$work/sudo.log"
export XDG_CACHE_HOME=/dev/null/cache # LibTorch is the next step; this ends it
unset Torch_DIR Torch_ROOT CMAKE_PREFIX_PATH
if run_dev build; then fail "it went on without LibTorch"; fi
expect_said "cannot create the folder /dev/null/cache/lockstep"
wanted=$(printf 'true\napt-get update\nenv DEBIAN_FRONTEND=noninteractive %s' "$install")
[[ $(cat "$work/sudo.log") == "$wanted" ]] || fail "sudo was asked for: $(cat "$work/sudo.log")"

# A clang-tidy that crashes: what it said is shown. In a copy, whose LibTorch and tools are stand-ins.
house=$work/house
mkdir -p "$house/cmake"
cp "$dev" "$house/dev"
dev=$house/dev
printf '#!/bin/bash\necho /nowhere\n' >"$house/cmake/fetch-libtorch.sh"
chmod +x "$house/cmake/fetch-libtorch.sh"
# shellcheck disable=SC2016
stand_in dpkg-query 'for name; do [[ $name == -* ]] || echo "$name:installed"; done'
stand_in git 'exit 0'
stand_in clang-format-14 'exit 0'
stand_in cmake 'mkdir -p build/lint'
stand_in run-clang-tidy-14 'echo "2 warnings generated." >&2; echo "clang-tidy-14: symbol lookup error" >&2; exit 127'
if run_dev lint; then fail "it took a crash for good code"; fi
expect_said "clang-tidy-14: symbol lookup error"
expect_said "build/logs/clang-tidy.log"
if grep -q "warnings generated" "$work/said"; then fail "it showed what clang-tidy counts"; fi
stand_in run-clang-tidy-14 'echo "2 warnings generated." >&2'
run_dev lint || fail "it failed for good code"

# The compiler: the newest clang++-N that is here. Where there is none, the package clang is installed; if that brings
# an older one, CMake takes its own.
# shellcheck disable=SC2016
stand_in cmake 'echo "$*" >>cmake.log; [[ $1 != --preset ]] || mkdir -p "build/$2"'
built_with() { # COMPILER, or nothing
  (cd "$house" && rm -rf build cmake.log && env -u CXX PATH="$PATH" ./dev build >"$work/said" 2>&1 </dev/null) || fail "./dev build failed"
  local compiler
  compiler=$(sed -n 's/^--preset.* -DCMAKE_CXX_COMPILER=\([^ ]*\).*/\1/p' "$house/cmake.log")
  [[ $compiler == "$1" ]] || fail "it built with '$compiler', not '$1'"
}
stand_in clang++-98 'exit 0'
stand_in clang++-9 'exit 0'
stand_in clang++-97 'exit 0'
built_with "$work/bin/clang++-98"

# A part of the tests: those that repeat nothing are in each, and each of the others is in one.
# shellcheck disable=SC2016
stand_in ctest 'case "$*" in
  *" -N "*" -LE repeated") echo "  Test #1: a_test" ;;
  *" -N "*) printf "  Test #%s: %s_test\n" 1 a 2 b 3 c 4 d ;;
  *) echo "$*" ;;
esac'
part_of_tests() { # N/M PATTERN
  (cd "$house" && LOCKSTEP_PART=$1 PATH="$PATH" ./dev test -L repeated >"$work/said" 2>&1 </dev/null) || fail "./dev test failed"
  expect_said " -L repeated -R ^($2)\$"
}
part_of_tests 1/2 "a_test|b_test|d_test"
part_of_tests 2/2 "a_test|c_test"
part_of_tests 1/1 "a_test|b_test|c_test|d_test"

mkdir "$work/others"
ln -s /usr/bin/* "$work/others/"
rm -f "$work/others"/clang++-* "$work/bin"/clang++-9[78]
PATH=$work/bin:$work/others
built_with ""
# shellcheck disable=SC2016
stand_in dpkg-query 'for name; do [[ $name == -* || $name == clang ]] || echo "$name:installed"; done'
rm "$work/sudo.log"
built_with ""
grep -q ' install .* clang$' "$work/sudo.log" || fail "clang was not installed"

# LibTorch comes while packages are installed, and nothing of that goes on once ./dev has ended.
printf '#!/bin/bash\ntouch %q; echo /nowhere; [[ ! -e %q ]] || sleep 100\n' "$work/fetching" "$work/slow" \
  >"$house/cmake/fetch-libtorch.sh"
# shellcheck disable=SC2016
stand_in dpkg-query 'for name; do [[ $name == -* || $name == ccache ]] || echo "$name:installed"; done'
# shellcheck disable=SC2016
stand_in sudo '[[ $* != *" install "* ]] || for _ in {1..100}; do [[ ! -e '"$work/fetching"' ]] || exit 0; sleep 0.1; done; [[ $* != *" install "* ]]'
cd "$house"
run_dev build || fail "LibTorch was not fetched beside the packages"
rm "$work/fetching"
touch "$work/slow"
# shellcheck disable=SC2016
stand_in sudo '[[ $* != *" install "* ]] || for _ in {1..100}; do [[ ! -e '"$work/fetching"' ]] || exit 1; sleep 0.1; done'
if run_dev build; then fail "it went on after a failed installation"; fi
for _ in {1..50}; do  # it was told to end, and a busy machine takes its time
  pgrep -f "$house/cmake/fetch-libtorch.sh" >/dev/null || break
  sleep 0.1
done
if pgrep -f "$house/cmake/fetch-libtorch.sh" >/dev/null; then fail "it still fetches LibTorch"; fi
rm "$work/slow"

# The report of a machine with a GPU, with stand-ins for the programs: each step is in it, also one that failed or took
# too long, and no folder of the machine.
cd "$work"
build=$work/gpus
mkdir -p "$build/tests/simulated"
# shellcheck disable=SC2016
printf '#!/bin/bash\n%s\n' 'case $1 in devices) echo "cuda:0  $0";; launch) ;; *) sleep 5;; esac' >"$build/lockstep"
printf '#!/bin/bash\necho "no peer"; exit 1\n' >"$build/lockstep-bench"
printf '#!/bin/bash\necho "ran $(basename "$0") $NCCL_MULTI_RANK_GPU_ENABLE $(cat "$2")"\n' >"$build/tests/unit_tests"
printf 'a_test|*\n' >"$build/tests/simulated/wings_unit_tests_shared.txt"
cp "$build/tests/simulated/wings_unit_tests_shared.txt" "$build/tests/simulated/wings_unit_tests_over_nccl.txt"
chmod +x "$build/lockstep" "$build/lockstep-bench" "$build/tests/unit_tests"
stand_in nvidia-smi 'echo "driver 1"'
stand_in python3 'exit 1'
stand_in compute-sanitizer 'echo "0 errors"'
report_gpus() { LOCKSTEP_STEP_SECONDS=1 HOME=$work "$root/benchmarks/gpu_report" "$build" report.md "$@" >"$work/said" 2>&1; }
if report_gpus "bench step, cuda:0" "lenet, cuda:0, eager" wings_unit_tests driver memcheck PyTorch; then fail "a step failed, and the report did not"; fi
for how in tests,\ wings_unit_tests_shared NCCL,\ wings_unit_tests_over_nccl; do
  grep -qx "| $how | ok | . |" report.md || fail "the tests are not in the report"
done
grep -qx 'ran unit_tests 1 a_test|\*' report.md || fail "the tests over NCCL do not run over it"
grep -qF '| bench step, cuda:0 | FAILED (1) |' report.md || fail "a failure is not in the report"
grep -qF '| lenet, cuda:0, eager | stopped after 1 s |' report.md || fail "a step without an end is not in the report"
grep -qF '| beside PyTorch | not run: no Python PyTorch' report.md || fail "what was not run is not in the report"
for said in "no peer" "driver 1" "0 errors"; do grep -qF -- "$said" report.md || fail "'$said' is not in the report"; done
if grep -qF "$work" report.md; then fail "the machine's folders are in the report"; fi
report_gpus machine || fail "the report of one step failed"
printf '#!/bin/bash\necho "GPUs  none"\n' >"$build/lockstep"
if report_gpus; then fail "it went on without a GPU"; fi
expect_said "LibTorch finds no GPU here"

echo "all as expected"
