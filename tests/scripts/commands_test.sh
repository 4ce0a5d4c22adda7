#!/usr/bin/env bash
# docs/commands.md is what the program's help says. After a change of the help: commands_test.sh PROGRAM --write
# The man page and the completion of bash have each command and each flag of that page.
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

# The words that bash offers where the last of these is completed.
offered() { # WORD...
  COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
  _lockstep_words
  printf '%s\n' "${COMPREPLY[@]}" | sort
}
# What the page has for a command, and for the program.
on_the_page() { # HEADING
  awk -v heading="## $1" '$0 == heading {inside = 1; next} /^## / {inside = 0} inside' "$document" |
    sed -nE '/^Commands:/,/^$/s/^  ([a-z-]+).*/\1/p; s/^  (-.,)?(--[a-z-]+).*/\1\n\2/p' | sed 's/,$//; /^$/d' | sort
}
# shellcheck disable=SC1090  # the program makes it
source <("$program" --completion bash)
page=$("$program" --man-page | sed 's/\\-/-/g')
while read -r heading; do
  # shellcheck disable=SC2086  # words
  if ! diff <(on_the_page "$heading") <(offered $heading ''); then
    echo "error: after '$heading' bash offers other words (>) than the page has (<)."
    exit 1
  fi
  for word in $(on_the_page "$heading"); do
    grep -q -- "^  .*$word" <<<"$page" || { echo "error: the man page lacks $word of $heading."; exit 1; }
  done
done < <(sed -n 's/^## //p' "$document")
[[ -z $(offered lockstep train --text '') && -z $(offered lockstep train --text = '') ]] || {
  echo "error: bash offers flags in the place of a file."
  exit 1
}
# Programs that read the others, where there are such.
if command -v zsh >/dev/null; then zsh -n <("$program" --completion zsh); fi
if command -v fish >/dev/null; then fish --no-execute <("$program" --completion fish); fi
if command -v man >/dev/null; then
  said=$("$program" --man-page | LC_ALL=C.UTF-8 MANROFFSEQ='' MANWIDTH=80 man --warnings -l - 2>&1 >/dev/null)
  [[ -z $said ]] || { echo "error: of the man page man says: $said"; exit 1; }
fi
