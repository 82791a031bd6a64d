#!/usr/bin/env bash
# Plays `make test` under each Python named (3.12 3.13 …), one after the other, each in an environment of its own (.venv-3.12, …),
# and ends with a line for each, and one for each test that failed. Exit 1 if one failed or is not on this machine. ARGS="-m 'not libero'" reaches pytest.
set -uo pipefail
cd "$(dirname "$0")/.."

# The first interpreter of a version that can make environments: on the path, pyenv's or uv's.
interpreter() {
  local python
  for python in "python$1" "$HOME"/.pyenv/versions/"$1".*/bin/python "$HOME"/.local/share/uv/python/cpython-"$1".*/bin/python3; do
    if "$python" -c "import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
      echo "$python"
      return
    fi
  done
  return 1
}

summary=() bad=0
for version in "$@"; do
  if ! python=$(interpreter "$version"); then
    summary+=("$version  not on this machine: uv python install $version, or pyenv install $version")
    bad=1
    continue
  fi
  echo "== Python $version"
  log=$(mktemp)
  began=$SECONDS
  if make --no-print-directory test VENV=".venv-$version" PYTHON="$python" 2>&1 | tee "$log"; then verdict=passed; else verdict=FAILED bad=1; fi
  told=$(grep -E '^=* ?[0-9]+ (failed|passed|skipped|error)' "$log" || cat "$log")  # pytest's last line, or what make said without it
  summary+=("$version  $verdict in $(((SECONDS - began + 30) / 60)) min: $(tail -n 1 <<< "$told" | sed -E 's/^=+ | =+$//g')")
  while read -r line; do summary+=("      $line"); done < <(grep -E '^(FAILED|ERROR) ' "$log")
  rm "$log"
done
printf '\n'
printf '%s\n' "${summary[@]}"
exit $bad
