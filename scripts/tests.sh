#!/usr/bin/env bash
# Runs all tests that cargo knows, in two lanes at the same time: those of the lab, and all others. Most tests of the lab wait for one emulated
# processor, beside which another is free.
#
#   scripts/tests.sh --all-features      the options are cargo's
set -euo pipefail
readonly LAB=crates/lab

# Cargo starts each test program by this script, in its lane. A lane passes over the programs of the other.
if [ "${1:-}" = --lane ]; then
    case "$2 $CARGO_MANIFEST_DIR" in
        lab\ */"$LAB") ;;
        lab\ * | others\ */"$LAB") exit 0 ;;
    esac
    exec "${@:3}"
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
host=$(rustc -vV | sed -n 's/^host: //p')
# The option outranks a runner of the environment.
lane() {
    PARTYWALL_PROGRAMS_ARE_BUILT=yes cargo test --workspace --all-targets --no-fail-fast \
        --config "target.$host.runner = ['$PWD/scripts/tests.sh', '--lane', '$1']" "${@:2}"
}
# Shown when they have ended, also by the limit of the step.
said=$(mktemp)
trap 'printf "\n-- tests of %s\n" "$LAB"; cat "$said"; rm -f "$said"' EXIT
rc=0
lane lab "$@" > "$said" 2>&1 &
lab=$!
lane others "$@" || rc=$?
wait "$lab" || rc=$?
exit "$rc"
