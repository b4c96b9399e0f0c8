#!/usr/bin/env bash
# Makes the checks of `cargo publish` for each crate, without the upload: its manifest is complete, its dependencies have versions, and its package has all files.
# Compiles nothing. Without a network, it packages the crates but does not compare them with the registry.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly SECONDS_FOR_THE_REGISTRY=90

log=$(mktemp)
trap 'rm -f "$log"' EXIT
options=(--workspace --no-verify --allow-dirty --quiet)
rc=0
timeout "$SECONDS_FOR_THE_REGISTRY" cargo publish --dry-run "${options[@]}" 2> "$log" || rc=$?
if [ "$rc" -ne 0 ]; then
    if [ "$rc" -ne 124 ] && ! grep -qE 'failed to (download|query|fetch|get)|network|resolve host|time(d)? ?out|Couldn.t connect' "$log"; then
        cat "$log" >&2
        exit "$rc"
    fi
    echo "skipped: the registry does not answer, so the crates are packaged and not compared with it"
    cargo package "${options[@]}" --exclude xtask --offline
fi
# A package has no other crate's files: code that includes one builds here and nowhere else. Tests may.
# `grep` ends with 1 if it finds nothing, and with more if it fails.
outside=$({ grep -rnE 'include(_str|_bytes)?!\("(\.\./)+(docs|debian|scripts|README)' crates/*/src --include='*.rs' || [ $? -eq 1 ]; } |
    awk -F: '{ file = $1; line = $2; tests = 0; if (file ~ /tests/) tests = 1
        for (n = 1; !tests && (getline text < file) > 0 && n < line; n++) if (text ~ /#\[cfg\(test\)\]/) tests = 1
        close(file); if (!tests) print }')
[ -z "$outside" ] || { printf 'these files are not in the package:\n%s\n' "$outside" >&2; exit 1; }
echo "$(find crates -maxdepth 2 -name Cargo.toml | wc -l) crates can be published"
