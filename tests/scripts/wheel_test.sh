#!/usr/bin/env bash
# Makes a wheel of this build, installs it into a fresh environment of Python beside the torch that the build has, and
# uses it there: the program trains, and a C++ program finds the package. The wheel names no folder of this machine.
#   wheel_test.sh BUILD-FOLDER TORCH_DIR WORK-FOLDER
set -euo pipefail
build=$1 site=$(cd "$2/../../../.." && pwd) work=$3
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=/usr/bin/python3  # whose pip ./dev installs

fail() {
  echo "error: $1"
  exit 1
}
skip() {
  echo "skipped: $1"
  exit 77
}
"$python" -m pip --version || skip "there is no pip"
compgen -G "$site/torch-*.dist-info" >/dev/null || skip "$site/torch does not come from PyPI"

rm -rf "$work"
mkdir -p "$work/files"
unset Torch_DIR Torch_ROOT CMAKE_PREFIX_PATH PYTHONPATH LD_LIBRARY_PATH
wheel=$("$python" "$root/cmake/make-wheel.py" "$build" "$work")
"$python" -m zipfile -e "$wheel" "$work/files"
for folder in "$root" "$build" "$site" "$HOME"; do
  if [[ $folder != / ]] && grep -raFl -- "$folder/" "$work/files"; then fail "these files of the wheel name $folder"; fi
done

"$python" -m venv --without-pip "$work/venv"
packages=$(echo "$work"/venv/lib/python3*/site-packages)
ln -s "$site"/{torch*,nvidia*} "$packages"  # as pip install torch would put them there
"$python" -m pip --python "$work/venv/bin/python" install --no-deps --no-index --disable-pip-version-check "$wheel"
"$work/venv/bin/python" - <<'END'
from importlib.metadata import requires, version
assert requires("lockstep") == ["torch==" + version("torch")], requires("lockstep")
END
export PATH=$work/venv/bin:$PATH
cd "$work"
lockstep train --devices 2xcpu --data synthetic --model mlp --epochs 1 | tee said
grep -q "on \[cpu, cpu\]" said || fail "the program did not train"

dir=$(lockstep --cmake-dir)
[[ $dir == "$packages"/lockstep/* ]] || fail "lockstep --cmake-dir is $dir"
cmake -S "$root/examples/consumer" -B consumer -Dlockstep_DIR="$dir"
grep "^Torch_DIR:.*=$packages/" consumer/CMakeCache.txt || fail "the package did not find the torch beside it"
cmake --build consumer
[[ $(consumer/consumer) == "2 ranks: w = 3.00, b = -1.00" ]] || fail "the C++ program printed something else"

if command -v pkg-config >/dev/null; then
  export PKG_CONFIG_PATH=${dir%/cmake/lockstep}/pkgconfig
  for flag in $(pkg-config --cflags --libs lockstep); do
    if [[ $flag == -[IL]* || $flag == /* ]]; then ls "${flag#-[IL]}" >/dev/null; fi
  done
fi
for file in man/man1/lockstep.1 bash-completion/completions/lockstep zsh/site-functions/_lockstep \
  fish/vendor_completions.d/lockstep.fish; do
  [[ -s venv/share/$file ]] || fail "there is no share/$file"
done
