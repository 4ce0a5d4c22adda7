#!/usr/bin/env bash
# Prints the folder of the LibTorch to build with (it holds include/, lib/ and share/cmake/); fetches the pinned one
# first if it is not there. Says what it does on stderr. Used by ./dev and by CMake; safe to run from several clones.
#
#   cmake/fetch-libtorch.sh [cpu|cuda]
#
# A LibTorch named by Torch_DIR, Torch_ROOT or CMAKE_PREFIX_PATH in the environment is taken instead. Without an
# argument the flavour is cuda if LOCKSTEP_CUDA=1 or this machine has an NVIDIA GPU (and LOCKSTEP_CUDA is not 0).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

die() {
  printf 'error: %s\n' "$@" >&2
  exit 1
}

user_libtorch() {  # the folder that the environment names, if it is a LibTorch
  local folder
  if [[ -f ${Torch_DIR:-}/TorchConfig.cmake ]]; then
    (cd "$Torch_DIR/../../.." && pwd)
    return
  fi
  local IFS=:
  for folder in ${Torch_ROOT:-} ${CMAKE_PREFIX_PATH:-}; do
    if [[ -f $folder/share/cmake/Torch/TorchConfig.cmake ]]; then
      printf '%s\n' "$folder"
      return
    fi
  done
  return 1
}

has_gpu() {
  compgen -G '/dev/nvidia[0-9]*' >/dev/null || { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }
}

wanted_flavour() {
  case ${LOCKSTEP_CUDA:-} in
    1 | ON | on) echo cuda ;;
    0 | OFF | off) echo cpu ;;
    '') if has_gpu; then echo cuda; else echo cpu; fi ;;
    *) die "LOCKSTEP_CUDA is '$LOCKSTEP_CUDA'; say 1 or 0, or leave it unset." ;;
  esac
}

find_pip_python() {  # the distribution's Python first: it is the one whose pip ./dev installs
  local python
  for python in /usr/bin/python3 python3; do
    if "$python" -m pip --version >/dev/null 2>&1; then
      printf '%s\n' "$python"
      return
    fi
  done
  die "fetching LibTorch needs Python's pip. On Debian and Ubuntu: apt-get install python3-pip"
}

# Installs into a folder beside the final one and renames it, so that the final folder is complete or absent.
install_libtorch() {
  local python
  python=$(find_pip_python)
  local part=$folder.part log=$folder.log
  rm -rf "$part" "$folder"
  mkdir -p "$part/tmp"

  local pip=("$python" -m pip install --disable-pip-version-check --no-cache-dir --no-compile --retries 10
    --root-user-action ignore --target "$part/new" -r "$here/libtorch-$flavour.txt")
  [[ $flavour == cuda ]] || pip+=(--no-deps)
  # pip unpacks in TMPDIR before it moves: on the same disk, since /tmp may be small.
  local failed=
  if [[ -t 2 ]]; then
    TMPDIR=$part/tmp "${pip[@]}" --log "$log" >&2 || failed="pip install"
  else
    TMPDIR=$part/tmp "${pip[@]}" --progress-bar off >"$log" 2>&1 || failed="pip install"
  fi
  if [[ -z $failed ]]; then
    "$python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$part/new/torch/lib/libtorch_cpu.so" >>"$log" 2>&1 ||
      failed="loading libtorch_cpu.so"
  fi
  if [[ -n $failed ]]; then
    rm -rf "$part"
    tail -n 15 "$log" | sed 's/^/    /' >&2
    die "fetching LibTorch $version failed at the step: $failed. Its log: $log" "Nothing was left behind; run the same command again."
  fi
  touch "$part/new/.complete"
  mv "$part/new" "$folder"
  rm -rf "$part" "$log"
}

user_libtorch && exit

flavour=${1:-$(wanted_flavour)}
[[ $flavour == cpu || $flavour == cuda ]] || die "unknown flavour '$flavour'; say cpu or cuda."
version=$(sed -n 's/^torch==//p' "$here/libtorch-cpu.txt")
cache=${XDG_CACHE_HOME:-$HOME/.cache}/lockstep
folder=$cache/libtorch-$version-$flavour

if [[ ! -f $folder/.complete ]]; then
  mkdir -p "$cache" || die "cannot create the folder $cache; set XDG_CACHE_HOME to one that can be written."
  exec {lock}>"$folder.lock"
  if ! flock --nonblock "$lock"; then
    echo "waiting for another process that fetches LibTorch into $folder …" >&2
    flock "$lock"
  fi
  if [[ ! -f $folder/.complete ]]; then
    if [[ $flavour == cuda ]]; then size="3 GB to download, 5.3 GB on disk"; else size="0.5 GB to download, 1.3 GB on disk"; fi
    echo "fetching LibTorch $version for $flavour into $folder ($size, once) …" >&2
    install_libtorch
  fi
fi
printf '%s/torch\n' "$folder"
