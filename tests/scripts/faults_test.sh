#!/usr/bin/env bash
# docs/faults.md has 20 rows, and each test that they name is there: `FILE_test: NAME`, or `ENTRY_test` of CTest's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
page=docs/faults.md
missing=0

say() {
  echo "error: $page: $1"
  missing=1
}

for row in $(seq 20); do
  line=$(grep "^| $row |" "$page") || line=
  [[ $line == *'_test'* ]] || say "row $row is not there, or names no test"
done
# shellcheck disable=SC2016  # the page has these backquotes
while IFS=': ' read -r file name; do
  source=$(find tests -name "$file.cpp")
  if [[ -z $name ]]; then
    grep -rqE "NAME( |.* )$file( |$)" tests tools --include=CMakeLists.txt || say "CTest has no entry $file"
  elif [[ -z $source ]]; then
    say "there is no $file.cpp"
  else
    grep -qE "^TEST(_F|_P)?\([A-Za-z0-9]+, $name\)" "$source" || say "$source has no test $name"
  fi
done < <(grep -oE '`[a-z0-9_]+_test(: [A-Za-z0-9]+)?`' "$page" | tr -d '`' | sort -u)
exit $missing
