#!/usr/bin/env bash
# A seed gives the same run each time, down to the order of all that happens; other seeds give other runs.
# $1: lockstep_sim
set -euo pipefail

trace_of() {
  "$1" --seed "$2" | grep -o 'trace [0-9a-f]\{16\}'
}

seen=()
for seed in 3 17 74; do
  first=$(trace_of "$1" "$seed")
  again=$(trace_of "$1" "$seed")
  if [[ $first != "$again" ]]; then
    echo "seed $seed gave the $first, and then the $again"
    exit 1
  fi
  seen+=("$first")
done
[[ $(printf '%s\n' "${seen[@]}" | sort -u | wc -l) == "${#seen[@]}" ]] || { echo "two seeds gave one run: ${seen[*]}"; exit 1; }
