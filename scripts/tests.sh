#!/usr/bin/env bash
# Runs tests that cargo knows: those of the lab, or all others. Most tests of the lab wait for one emulated processor, beside which another is free,
# so the two can run at the same time.
#
#   scripts/tests.sh lab --all-features        the options are cargo's
#   scripts/tests.sh others --all-features
set -euo pipefail
readonly LAB=crates/lab

# Cargo starts each test program by this script, which passes over those of the other part.
if [ "${1:-}" = --program ]; then
    case "$2 $CARGO_MANIFEST_DIR" in
        lab\ */"$LAB") ;;
        lab\ * | others\ */"$LAB") exit 0 ;;
    esac
    exec "${@:3}"
fi

case "${1:-}" in
    lab | others) ;;
    *) echo "usage: scripts/tests.sh lab|others [OPTIONS OF CARGO]" >&2; exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
host=$(rustc -vV | sed -n 's/^host: //p')
# The option outranks a runner of the environment.
PARTYWALL_PROGRAMS_ARE_BUILT=yes exec cargo test --workspace --all-targets --no-fail-fast \
    --config "target.$host.runner = ['$PWD/scripts/tests.sh', '--program', '$1']" "${@:2}"
