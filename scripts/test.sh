#!/usr/bin/env bash
# Everything: the gate, all tests, the models, a while of fuzzing, and the programs as a user runs them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/steps.sh
source scripts/gate.sh

# Programs of this tree that run now: whatever more there are at the end was left behind.
running() {
    local process program
    for process in /proc/[0-9]*; do
        program=$(readlink "$process/exe") || continue
        case $program in
            "$TARGET_DIR"/*/partywall*) echo "process ${process#/proc/} of $program" ;;
            */qemu-system-*)
                ! grep -qzF "$TARGET_DIR/lab/" "$process/cmdline" || echo "process ${process#/proc/}, a machine of the lab" ;;
        esac
    done 2> /dev/null
}
spaces() {
    PATH=$PATH:/usr/sbin:/sbin ip netns list 2> /dev/null | sed "s/^/network namespace /" || true
}
nothing_left() {
    local left
    left=$(comm -13 <(sort <<< "$1") <({ running; spaces; } | sort))
    [ -z "$left" ] || { printf 'left behind:\n%s\n' "$left"; return 1; }
    echo "no program and no network namespace was left behind"
}
export -f running spaces nothing_left
before=$({ running; spaces; })

gate
# Tests start the programs, so they are built first.
step "programs, for tests" cargo build --workspace --bins
step "the preloaded library, for tests" cargo build --package partywall-preload
step "tests" cargo test --workspace --all-targets --no-fail-fast "${FEATURES[@]}"
step "examples in the documentation" cargo test --workspace --doc "${FEATURES[@]}"
step "models (loom)" scripts/loom.sh
step "fuzzing, in short" env FUZZ_SECONDS="${FUZZ_SMOKE_SECONDS:-5}" FUZZ_ARGS="-verbosity=0 -print_final_stats=1" scripts/fuzz.sh
step "programs, optimised" cargo build --release --workspace --exclude xtask --bins
step "the preloaded library, optimised" cargo build --release --package partywall-preload
step "bench, in short" "$TARGET_DIR/release/partywall" bench latency --quick
step "demo, in short" "$TARGET_DIR/release/partywall" demo --quick
# shellcheck disable=SC2016 # expanded by the inner shell
step "nothing left behind" bash -c 'nothing_left "$1"' bash "$before"
summary
