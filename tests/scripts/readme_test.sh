#!/usr/bin/env bash
# README.md stays short, its links lead somewhere, and it prints no hash, whose digits would depend on the processor.
#   readme_test.sh [FILE, default README.md]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
page=${1:-README.md}
wrong=0

say() {
  echo "error: $page: $1"
  wrong=1
}

lines=$(wc -l <"$page") words=$(wc -w <"$page")
((lines <= 120)) || say "$lines lines; at most 120. Move something to docs/."
((words <= 900)) || say "$words words; at most 900. Move something to docs/."
while read -r line; do say "line $line has more than 120 characters"; done < <(LC_ALL=C.UTF-8 grep -nE '.{121}' "$page" | cut -d: -f1)
while read -r hash; do say "the hash $hash"; done < <(grep -oE '\b[0-9a-f]{16}\b' "$page" | sort -u)

while IFS='#' read -r file heading; do
  if [[ ! -e $file ]]; then
    say "there is no $file"
  elif [[ -n $heading ]] && ! sed -n 's/^##* //p' "$file" | tr 'A-Z ' 'a-z-' | tr -cd 'a-z0-9_\n-' | grep -qx "$heading"; then
    say "$file has no heading #$heading"
  fi
done < <(grep -oE '\]\([^) ]+\)' "$page" | sed -E 's/^\]\(|\)$//g' | grep -v '^https:')
exit $wrong
