#!/usr/bin/env bash
# cmake/fetch-libtorch.sh against small wheels made here: a failed, an interrupted, a repeated and a concurrent fetch.
set -euo pipefail
cmake_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../cmake" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

export XDG_CACHE_HOME=$work/cache PIP_NO_INDEX=1 PIP_FIND_LINKS=$work/wheels
unset Torch_DIR Torch_ROOT CMAKE_PREFIX_PATH LOCKSTEP_CUDA
version=$(sed -n 's/^torch==//p' "$cmake_folder/libtorch-cpu.txt")
folder=$XDG_CACHE_HOME/lockstep/libtorch-$version-cpu

fail() {
  echo "error: $1. The script printed '$(cat "$work/out")' and said:"
  cat "$work/err"
  exit 1
}
fetch() { "$cmake_folder/fetch-libtorch.sh" cpu >"$work/out" 2>"$work/err"; }
expect_said() { grep -q "$1" "$work/err" || fail "it did not say '$1'"; }
expect_fetched() {
  [[ $(cat "$work/out") == "$folder/torch" && -f $folder/torch/lib/libtorch_cpu.so && -f $folder/.complete ]] ||
    fail "there is no complete LibTorch in $folder"
}
expect_nothing_left() { [[ ! -e $folder && ! -e $folder.part ]] || fail "something was left behind"; }

# make_wheels LIBRARY: wheels by the pinned names and versions; torch's holds LIBRARY as libtorch_cpu.so.
make_wheels() {
  rm -rf "$work/wheels"
  mkdir "$work/wheels"
  /usr/bin/env python3 - "$cmake_folder/libtorch-cpu.txt" "$work/wheels" "$1" <<'END'
import pathlib, re, sys, zipfile
requirements, wheels, library = map(pathlib.Path, sys.argv[1:])
for name, version in re.findall(r"^([\w-]+)==(\S+)$", requirements.read_text(), re.M):
    name = name.replace("-", "_")
    files = {"torch/lib/libtorch_cpu.so": library.read_bytes()} if name == "torch" else {f"nvidia/{name}": b""}
    info = f"{name}-{version}.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: absent\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(wheels / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
END
}
echo 'int answer = 42;' | c++ -x c++ -shared -fPIC -o "$work/good.so" -
echo 'not a library' >"$work/bad.so"

mkdir "$work/wheels"
if fetch; then fail "it went well without any wheel"; fi
expect_said 'step: pip install'
expect_said "$folder.log"
[[ -s $folder.log ]] || fail "there is no log"
expect_nothing_left

make_wheels "$work/bad.so"
if fetch; then fail "it took a libtorch_cpu.so that does not load"; fi
expect_said 'step: loading libtorch_cpu.so'
expect_nothing_left

make_wheels "$work/good.so"
fetch || fail "it failed"
expect_fetched
expect_said "fetching LibTorch $version"

mv "$work/wheels" "$work/no-wheels"
fetch || fail "the second call failed"
expect_fetched
[[ ! -s $work/err ]] || fail "the second call did not go straight to its answer"
mv "$work/no-wheels" "$work/wheels"

rm "$folder/.complete" "$folder/torch/lib/libtorch_cpu.so" # as after a power cut
mkdir -p "$folder.part/new/torch"
fetch || fail "it did not recover from an interrupted fetch"
expect_fetched
[[ ! -e $folder.part ]] || fail "the interrupted fetch is still there"

rm -rf "$folder"
for i in 1 2 3; do "$cmake_folder/fetch-libtorch.sh" cpu >"$work/out$i" 2>"$work/err$i" & done
wait
cat "$work"/err[123] >"$work/err"
for i in 1 2 3; do
  cp "$work/out$i" "$work/out"
  expect_fetched
done
[[ $(grep -c '^fetching' "$work/err") == 1 ]] || fail "three at a time did not fetch once"

mkdir -p "$work/own/share/cmake/Torch"
touch "$work/own/share/cmake/Torch/TorchConfig.cmake"
CMAKE_PREFIX_PATH=/nowhere:$work/own fetch || fail "it failed with a LibTorch of the user's own"
[[ $(cat "$work/out") == "$work/own" ]] || fail "it did not take the user's own LibTorch"

echo "all as expected"
