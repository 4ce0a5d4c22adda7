#!/usr/bin/env bash
# docs/commands.md is what the program's help says. After a change of the help: commands_test.sh PROGRAM --write
set -euo pipefail
program=$1
unset XDG_DATA_HOME
export HOME=/home/you  # in defaults of the help
document=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/docs/commands.md

section() { # WORDS...: what the help of these words says, and then of each command that it lists
  local help command
  help=$("$program" "$@" --help)
  printf '\n## lockstep%s\n```\n' "${*:+ $*}"
  if grep -q -- --help-all <<<"$help"; then "$program" "$@" --help-all; else printf '%s\n' "$help"; fi
  printf '```\n'
  # shellcheck disable=SC2013  # each line is one word
  for command in $(awk '/^Commands:/ {inside = 1; next} /^$/ {inside = 0} inside && /^  [a-z]/ {print $1}' <<<"$help"); do
    section "$@" "$command"
  done
}

made=$(printf '# Commands\nWhat each command says to --help. tests/scripts/commands_test.sh makes this page.\n' && section)
if [[ ${2:-} == --write ]]; then
  printf '%s\n' "$made" >"$document"
elif ! diff "$document" <(printf '%s\n' "$made"); then
  echo "error: docs/commands.md is not what the help says (see above): tests/scripts/commands_test.sh $program --write"
  exit 1
fi
