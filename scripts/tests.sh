#!/usr/bin/env bash
# Runs tests that cargo knows: those of the lab, or all others. Most tests of the lab wait for one emulated processor, beside which another is free,
# so the two can run at the same time. `older` runs the tests again that depend on newer interfaces of the kernel, with these hidden.
#
#   scripts/tests.sh lab --all-features        the options are cargo's
#   scripts/tests.sh others --all-features
#   scripts/tests.sh older --all-features
set -euo pipefail
readonly LAB=crates/lab
# That of Debian 12. It lacks `SO_PASSRIGHTS` (Linux 6.16) and `SO_PEERPIDFD` (6.5).
readonly OLDER_KERNEL=6.1
# Parts of the names of tests that run again, and cargo's options for the programs that have them.
readonly OLDER=(server:: broker:: datagram:: bell link:: packet:: closing:: relay:: dead_peer)
readonly OLDER_PROGRAMS=(--lib --test deaths)

# Runs a test program. Of what its tests print when they pass, which the harness shows if it is asked to, only that is shown that they leave out.
run() {
    "$@" --show-output | sed -u -E '/^successes:$/,/^(failures:|test result:)/{/^(NOT TESTED|LEFT OUT|skipped|SKIPPED|failures|test result):/!d}'
}

# Cargo starts each test program by this script, which passes over those of the other part.
if [ "${1:-}" = --program ]; then
    case "$2 $CARGO_MANIFEST_DIR" in
        older\ */crates/region | older\ */crates/daemon | older\ */crates/preload)
            run /usr/bin/python3 ../../scripts/older-kernel.py "$OLDER_KERNEL" "${@:3}" ;;
        older\ *) ;;
        lab\ */"$LAB") run "${@:3}" ;;
        lab\ * | others\ */"$LAB") ;;
        *) run "${@:3}" ;;
    esac
    exit
fi

case "${1:-}" in
    lab | others) programs=(--all-targets) names=() ;;
    older) programs=("${OLDER_PROGRAMS[@]}") names=(-- "${OLDER[@]}") ;;
    *) echo "usage: scripts/tests.sh lab|others|older [OPTIONS OF CARGO]" >&2; exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
host=$(rustc -vV | sed -n 's/^host: //p')
# The option outranks a runner of the environment.
PARTYWALL_PROGRAMS_ARE_BUILT=yes exec cargo test --workspace "${programs[@]}" --no-fail-fast \
    --config "target.$host.runner = ['$PWD/scripts/tests.sh', '--program', '$1']" "${@:2}" "${names[@]}"
